"""Runs `python -m gpt2_triton COMMAND`, which is also `gpt2-triton COMMAND`."""

import sys


def main() -> int:
    """Run the command in sys.argv and return its exit code.  Ctrl-C gives 130, even during the imports."""
    try:
        from gpt2_triton.commands import run

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
