"""`python -m gpt2_triton COMMAND`: everything but training, which is train.py."""

import sys

from gpt2_triton.cli import main
from gpt2_triton.commands import app

if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
