"""Runs `python -m gpt2_triton COMMAND`; training is train.py."""

import sys

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main

if __name__ == "__main__":
    sys.exit(main(tools, sys.argv[1:]))
