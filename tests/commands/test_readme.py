"""Runs every command of README.md, docs/interop.md and docs/scaling.md: to its end where that takes seconds on a CPU,
else as far as it gets without a GPU.

Other tests cover what is left out here: steps of training (tests/training/test_quickstart.py), wandb-export
(tests/training/test_wandb_logger.py), the benchmarks (tests/benchmarks/).
"""

import itertools
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.__main__ import app as benchmarks_app
from gpt2_triton import device
from gpt2_triton.checkpoint.save import save_checkpoint
from gpt2_triton.commands import tools as tools_app
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import FLAGS, parse_overrides
from gpt2_triton.commands.train import app as train_app
from gpt2_triton.config.config import options
from gpt2_triton.config.load import load_config
from gpt2_triton.data.shards import open_shards
from tests.support import checkpoints
from tests.support.foreign import config_of, nanogpt_checkpoint, nanogpt_content, random_params
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text().replace("\\\n", "")
INTEROP = (ROOT / "docs" / "interop.md").read_text()
SCALING = (ROOT / "docs" / "scaling.md").read_text()
SPANS = re.findall(r"(?<!`)`([^`\n]+)`(?!`)", TEXT)
COMMANDS = [
    line.split(" # ")[0].strip()
    for block in [*re.findall(r"^```\n(.*?)^```", TEXT + INTEROP + SCALING, re.M | re.S), *SPANS]
    for line in block.splitlines()
    if line.startswith(("python train.py", "python -m gpt2_triton", "python -m benchmarks ", "torchrun", "srun"))
]
TRAINING = [c for c in COMMANDS if "train.py configs/" in c]
RANKS = re.compile(r"--(?:nproc_per_node|ntasks-per-node) (\d+)")
TOOLS = [c for c in COMMANDS if "-m gpt2_triton" in c]
BENCHMARKS = [c for c in COMMANDS if "-m benchmarks " in c]
OPTIONS = [option for span in SPANS if span.startswith("--") for option in re.split(r" (?=--\w+\.)", span)]


def _of_training(option):
    return "." in option.split()[0] or option.split()[0][2:] in FLAGS


def words_of(command):
    """Return the program's arguments; for train.py --gpus is added with the number of ranks that a launcher starts."""
    words = shlex.split(command)
    if " -m " in command:
        return words[3:]
    ranks = RANKS.search(command)
    return words[words.index("train.py") + 1 :] + (["--gpus", ranks[1]] if ranks else [])


def test_commands_and_options_are_found_in_the_text():
    assert len(TRAINING) >= 3 and len(TOOLS) >= 6 and len(BENCHMARKS) >= 4 and len(OPTIONS) >= 6
    assert len(TRAINING + TOOLS + BENCHMARKS) + COMMANDS.count("python train.py --help") == len(COMMANDS)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with what the commands name: a text, shards made of it with the README's commands, and two runs."""
    directory = tmp_path_factory.mktemp("workplace")
    (directory / "configs").symlink_to(ROOT / "configs")
    (directory / "mytext.txt").write_text("To be, or not to be: that is the question.\n" * 2000)
    question = dict(activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1)
    (directory / "questions.jsonl").write_text(json.dumps(question) + "\n")
    model, config = tiny_model(model=dict(vocab_size=50257), data=dict(tokenizer="gpt2"))
    for run in ("mine", "124m"):
        state = checkpoints.state(1, config=config.to_dict())
        save_checkpoint(directory / "runs" / run / "checkpoints", 1, model.state_buffers(), state, keep=1)
        (directory / "runs" / run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5, "tokens": 1024}\n')
    nanogpt_checkpoint(directory, nanogpt_content(random_params(config_of())))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        for download in ("dataset.prepare_dataset", "pretokenized.download"):  # run in tests/data/prepare
            patch.setattr(f"gpt2_triton.data.prepare.{download}", lambda *arguments: None)
        for command in TOOLS:
            if words_of(command)[0] == "prepare":
                assert main(tools_app, words_of(command)) == 0
    return directory


@pytest.mark.parametrize("command", TRAINING)
def test_training_commands_plan_and_find_their_data(command, capsys, monkeypatch, workplace):
    monkeypatch.chdir(workplace)
    path, *words = words_of(command)
    planned = "--plan" in words
    assert main(train_app, [path, *words] if planned else [path, *words, "--plan"]) == 0
    assert "\narena " in capsys.readouterr().out
    if "--data.train" in words:
        keys = itertools.takewhile(lambda word: word != "--run_dir", words)  # which stands last
        config = load_config(path, parse_overrides(keys))
        for pattern in (config.data.train, config.data.val):
            assert open_shards(pattern, config.model.vocab_size, config.train.seq_len)


def test_train_help_lists_keys(capsys):
    assert main(train_app, ["--help"]) == 0
    assert "--optim.lr" in capsys.readouterr().out


@pytest.mark.parametrize("command", [c for c in TOOLS if not c.split()[3].startswith("prepare")])
def test_tool_commands(command, capsys, monkeypatch, workplace, tmp_path):
    monkeypatch.chdir(workplace)
    words = words_of(command)
    if words[0] == "export":  # one directory for all of them would be refused
        words[words.index("--out") + 1] = str(tmp_path / "exported")
    if words[0] == "wandb-export" or "RUN" in words:
        words.append("--help")
    if words[0] in ("sample", "perplexity"):  # in the interpreter a forward pass takes half a second
        words[words.index("--tokens") + 1] = "3" if words[0] == "sample" else "32"
    if words[0] == "hellaswag":
        words += ["--data", "questions.jsonl"]
    assert main(tools_app, words) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    if words[0] == "sample":
        assert "Once upon a time" in printed
    if words[0] == "plot":
        assert (workplace / words[words.index("-o") + 1]).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("command", BENCHMARKS)
def test_benchmark_commands_parse(command, capsys, monkeypatch):
    monkeypatch.setattr(device, "present", lambda: False)
    name, *options = words_of(command)
    if name == "verify":
        assert main(benchmarks_app, [name, *options, "--help"]) == 0
    else:
        assert main(benchmarks_app, [name, *options]) == 2
        assert capsys.readouterr().err == f"error: {name}: needs a CUDA GPU, found none\n"


@pytest.mark.parametrize("option", [o for o in OPTIONS if _of_training(o)])
def test_options_in_the_text_are_accepted(option, capsys):
    """`--key a|b` names each of its values."""
    name, _, values = option.partition(" ")
    for value in values.split("|"):
        words = [name, *value.split()]
        assert main(train_app, [str(ROOT / "configs/gpt2_124m.yaml"), *words, "--print_config"]) == 0, option
        printed = yaml.safe_load(capsys.readouterr().out)
        if "." in name:
            section, _, key = name[2:].partition(".")
            if key == "size":  # printed as the keys that it expands to
                continue
            found = printed[section][key]
            assert found == type(found)(value)


@pytest.mark.parametrize("option", [o for o in OPTIONS if not _of_training(o)])
def test_options_of_tools_in_the_text_are_known(option, capsys):
    for app, commands in ((tools_app, TOOLS), (benchmarks_app, BENCHMARKS)):
        for command in commands:
            assert main(app, [*words_of(command)[:1], "--help"]) == 0
    assert re.search(rf"{option.split()[0]}\b", capsys.readouterr().out)


def test_options_of_other_projects_map_to_known_keys():
    cells = [line.split("|")[-2] for line in INTEROP.partition("## Options")[2].splitlines() if line.startswith("| ")]
    names = [name for cell in cells[1:] for name in re.findall(r"`([^`]+)`", cell)]
    known = {key for key, _ in options()} | {f"--{flag}" for flag in FLAGS}
    assert len(names) >= 30 and {name.split()[0] for name in names} <= known


LINKS = re.findall(r"\]\(([\w/.]+)\)", TEXT)
FILES = re.findall(r"`((?:tests|docs|benchmarks|configs|gpt2_triton)/[\w/.]*)`", TEXT)


@pytest.mark.parametrize("path", sorted({*LINKS, *FILES}))
def test_files_in_the_text_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_make_targets_run_commands_that_exist(capsys):
    """`make -n` prints what a target would run."""
    for target in re.findall(r"^make (\w+)", TEXT, re.M):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for line in done.stdout.splitlines():
            if "train.py" in line:
                assert main(train_app, [str(ROOT / shlex.split(line)[2]), "--print_config"]) == 0
            elif "-m gpt2_triton" in line:
                assert main(tools_app, [*words_of(line), "--help"]) == 0
            elif "-m benchmarks " in line:
                assert main(benchmarks_app, [*words_of(line), "--help"]) == 0
