"""The commands of `gpt2-triton`, or `python -m gpt2_triton`: a module for each
command or family of commands.

A module is imported when its command runs: torch and numpy read environment variables at their
import, and `select_device` sets the variables before.
"""

import sys

from gpt2_triton.commands.app import main, make_app
from gpt2_triton.config import recipes
from gpt2_triton.console import command_line, print_line

# where cyclopts would write ARGS
USAGES = {
    "compile": "[OPTIONS] CONFIG [--section.key VALUE]...",
    "configs": "[NAME]",
    "perplexity": "[OPTIONS] CHECKPOINT [SHARDS...]",
}

tools = make_app(
    command_line(""),
    "Train GPT-2, Llama 3 and Qwen3: prepare data, train, sample, evaluate, export.",
)
for name, path in {
    "train": "train:command",
    "configs": "configs:configs",
    "compile": "compile:compile_kernels",
    "prepare": "prepare:app",
    "tokenizer": "tokenizer:tokenizer",
    "sample": "sample:sample",
    "export": "export:export",
    "hellaswag": "evaluate:hellaswag",
    "perplexity": "evaluate:perplexity",
    "plot": "plot:plot",
    "stats": "stats:stats",
}.items():
    given = {"usage": f"Usage: {command_line(name)} {USAGES[name]}"} if name in USAGES else {}
    tools.command(f"gpt2_triton.commands.{path}", name=name, **given)

REMOVED = {  # command: its replacement
    "bench": "run python -m benchmarks steps, ops or tune in the root of a checkout",
    "config-table": "docs/guide/config.md has the table",
    "evaluate": (
        "eval/lm_eval.sh CHECKPOINT OUT TASKS scores by "
        "lm-evaluation-harness; hellaswag still exists"
    ),
    "prepare climbmix": (
        "`prepare fineweb --source OWNER/NAME --version NAME` takes other datasets of the Hub"
    ),
    "verify": "run python -m benchmarks verify in the root of a checkout",
    "wandb-export": "train with --log.wandb offline, and run `wandb sync RUN/wandb/offline-run-*`",
}


def run() -> int:
    """Run the command in sys.argv and return its exit code."""
    words = sys.argv[1:]
    wrong = {name: f"has gone: {todo}" for name, todo in REMOVED.items()}
    wrong |= {
        name: f"is a recipe; use `{command_line(f'train {name}')}`" for name in recipes.names()
    }
    for name in (" ".join(words[:1]), " ".join(words[:2])):
        if name in wrong:
            print_line(f"error: {name} {wrong[name]}", error=True)
            return 2
    return main(tools, words)
