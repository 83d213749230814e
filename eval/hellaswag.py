"""HellaSwag of a run or of other weights: the command
`gpt2-triton hellaswag`, on this checkout's code.

python eval/hellaswag.py runs/124m
python eval/hellaswag.py hf:openai-community/gpt2 --data hellaswag_val.jsonl --json hellaswag.json
python eval/hellaswag.py --help
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpt2_triton.commands import tools  # noqa: E402
from gpt2_triton.commands.app import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(tools, ["hellaswag", *sys.argv[1:]]))
