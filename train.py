"""Train GPT-2 or Llama 3.

python train.py configs/quickstart.yaml                              a small model, also without a
                                                                     GPU
python train.py configs/gpt2_124m.yaml --run_dir runs/124m --resume  start, or resume from the
                                                                     newest checkpoint
python train.py configs/gpt2_124m.yaml --optim.lr 3e-4 --plan        memory and sizes, without
                                                                     training or a GPU
python train.py --help                                               every option with its meaning
                                                                     and default
"""

import sys

from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app

if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
