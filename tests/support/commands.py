"""Commands as a user types them, in this process; they return their exit code."""

import shlex

from gpt2_triton.commands import tools
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app


def run_tool(line: str) -> int:
    return main(tools, shlex.split(line))


def run_train(line: str) -> int:
    return main(app, shlex.split(line))
