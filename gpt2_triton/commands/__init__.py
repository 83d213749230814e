"""The commands of `python -m gpt2_triton`, one module for each command or family; train.py runs commands/train.py.

They are registered by import path: a module is imported when its command runs, since torch and numpy read environment
variables, which `select_device` sets, when they are imported.
"""

from gpt2_triton.commands.app import make_app

tools = make_app("gpt2_triton", "Data, samples, exports, plots and checks; training is train.py.")
for name, path in {
    "prepare": "prepare:app",
    "sample": "sample:sample",
    "export": "export:export",
    "hellaswag": "evaluate:hellaswag",
    "perplexity": "evaluate:perplexity",
    "plot": "plot:plot",
    "stats": "stats:stats",
    "wandb-export": "wandb_export:wandb_export",
    "config-table": "config_table:config_table",
    "bench": "bench:bench",
    "verify": "bench:verify",
}.items():
    tools.command(f"gpt2_triton.commands.{path}", name=name)
