"""Runs `python -m gpt2_triton COMMAND`, which is also `gpt2-triton COMMAND`."""

import sys

from gpt2_triton.commands import run as main

if __name__ == "__main__":
    sys.exit(main())
