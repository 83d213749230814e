"""The commands of `gpt2-triton`, which is also `python -m gpt2_triton`: one module for each command or family.

They are registered by import path: a module is imported when its command runs, since torch and numpy read environment
variables, which `select_device` sets, when they are imported.
"""

import sys

from gpt2_triton.commands.app import main, make_app, usage_line
from gpt2_triton.console import command_line

OF_A_CHECKOUT = ("config-table", "bench", "verify")  # not listed
ARGUMENTS = {  # in the usage line, where cyclopts would write [ARGS]
    "configs": "[NAME]",
    "plot": "[OPTIONS] RUNS...",
    "perplexity": "[OPTIONS] CHECKPOINT [SHARDS...]",
}
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
    usage = {"usage": usage_line(name, ARGUMENTS[name])} if name in ARGUMENTS else {}
    tools.command(f"gpt2_triton.commands.{path}", name=name, show=name not in OF_A_CHECKOUT, **usage)


def run() -> int:
    """Run the command in sys.argv and return its exit code."""
    return main(tools, sys.argv[1:])
