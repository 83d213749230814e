"""`python -m gpt2_triton COMMAND`: one module a command, or a family of them; train.py is commands/train.py."""

from gpt2_triton.commands import prepare
from gpt2_triton.commands.app import make_app
from gpt2_triton.commands.bench import bench, verify
from gpt2_triton.commands.config_table import config_table
from gpt2_triton.commands.evaluate import hellaswag, perplexity
from gpt2_triton.commands.export import export
from gpt2_triton.commands.plot import plot
from gpt2_triton.commands.sample import sample
from gpt2_triton.commands.stats import stats
from gpt2_triton.commands.wandb_export import wandb_export

tools = make_app("gpt2_triton", "Data, samples, exports, plots and checks; training is train.py.")
tools.command(prepare.app)
for command in (sample, export, hellaswag, perplexity, plot, stats, wandb_export, config_table, verify, bench):
    tools.command(command)
