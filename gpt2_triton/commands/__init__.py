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


def run() -> int:
    """Run the command in sys.argv and return its exit code."""
    words = sys.argv[1:]
    if words and words[0] in recipes.names():
        todo = f"use `{command_line(f'train {words[0]}')}`"
        print_line(f"error: {words[0]} is a recipe; {todo}", error=True)
        return 2
    return main(tools, words)
