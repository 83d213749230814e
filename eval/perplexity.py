"""Loss, perplexity and bits per byte on token shards: the command
`gpt2-triton perplexity`, on this checkout's code.

python eval/perplexity.py runs/124m
python eval/perplexity.py hf:openai-community/gpt2 "data/fineweb10B/val_*.bin" --tokens 1048576
python eval/perplexity.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt2_triton.commands import tools  # noqa: E402
from gpt2_triton.commands.app import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(tools, ["perplexity", *sys.argv[1:]]))
