"""Runs `python -m gpt2_triton COMMAND`."""

import sys

from gpt2_triton.commands import run

if __name__ == "__main__":
    sys.exit(run())
