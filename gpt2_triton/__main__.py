"""Runs `python -m gpt2_triton COMMAND`, which is also `gpt2-triton COMMAND`."""

import sys


def main() -> int:
    """Run the command in sys.argv and return its exit code, 130 for an interrupt, also while modules are imported."""
    try:
        from gpt2_triton.commands import run

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
