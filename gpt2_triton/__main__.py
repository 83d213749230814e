"""`python -m gpt2_triton COMMAND`: everything but training, which is train.py."""

import sys

from gpt2_triton.cli import main, tools_app

if __name__ == "__main__":
    sys.exit(main(tools_app, sys.argv[1:]))
