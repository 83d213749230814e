"""The commands of `gpt2-triton`, which is also `python -m gpt2_triton`: one module for each command or family.

They are registered by import path: a module is imported when its command runs, since torch and numpy read environment
variables, which `select_device` sets, when they are imported.
"""

import sys

from gpt2_triton.commands.app import main, make_app
from gpt2_triton.console import command_line

tools = make_app(command_line(""), "Train GPT-2: prepare data, train, sample, evaluate, export.")
for name, path in {
    "train": "train:command",
    "configs": "configs:configs",
    "prepare": "prepare:app",
    "sample": "sample:sample",
    "export": "export:export",
    "evaluate": "evaluate:evaluate",
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


def run() -> int:
    """Run the command in sys.argv and return its exit code."""
    return main(tools, sys.argv[1:])
