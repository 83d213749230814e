"""Print a model's loss, perplexity and bits per byte over token shards; the same as `gpt2-triton perplexity`.

python eval/perplexity.py runs/124m "data/fineweb10B/val_*.bin"           a run, or one of its step directories
python eval/perplexity.py runs/124m                                      over the data.val of the run
python eval/perplexity.py hf:gpt2 "data/fineweb10B/val_*.bin"             weights of transformers, llm.c or nanoGPT
python eval/perplexity.py --help                                          every option with its meaning and default
"""

import sys

from gpt2_triton.commands.app import main, make_app
from gpt2_triton.commands.evaluate import perplexity

app = make_app("eval/perplexity.py")
app.default(perplexity)

if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
