"""Print a model's accuracy on HellaSwag; the same as `gpt2-triton hellaswag`.

python eval/hellaswag.py runs/124m --json hellaswag.json                  a run, or one of its step directories
python eval/hellaswag.py hf:gpt2 --data hellaswag_val.jsonl               weights of transformers, llm.c or nanoGPT
python eval/hellaswag.py --help                                           every option with its meaning and default
"""

import sys

from gpt2_triton.commands.app import main, make_app
from gpt2_triton.commands.evaluate import hellaswag

app = make_app("eval/hellaswag.py")
app.default(hellaswag)

if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
