"""Every command of README.md and of the guide: run to its end where that takes seconds on a CPU, else parsed, its
recipes, keys and options looked up; and what else the pages say that can be checked: links, files, promises, length.

Other tests cover what is left out here: steps of training (tests/training/test_quickstart.py), the
benchmarks (tests/benchmarks/).
"""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest
import yaml
from rich.console import Console

import gpt2_triton
from benchmarks.__main__ import app as benchmarks_app
from gpt2_triton import device
from gpt2_triton.checkpoint.save import save_checkpoint
from gpt2_triton.commands import tools as tools_app
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import FLAGS
from gpt2_triton.commands.train import app as train_app
from gpt2_triton.config.schema import options
from tests.support import checkpoints
from tests.support.foreign import config_of, nanogpt_checkpoint, nanogpt_content, random_params
from tests.support.pages import (
    FENCE,
    GUIDE,
    PAGES,
    README,
    ROOT,
    Command,
    anchors,
    blocks,
    command_of,
    commands,
    links,
    spans,
    text_of,
)
from tests.support.tiny import tiny_model

USED = [README, *GUIDE]
KEYS = {key for key, _ in options()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
FOUND = {(c.line, c.inline): c for page in USED for c in commands(text_of(page))}.values()  # each once
RUN = {  # tools that run to their end on tiny data
    "prepare", "sample", "export", "hellaswag", "perplexity", "plot", "configs", "config-table", "--version",
}  # fmt: skip
PARSED = {"stats"}
OPTIONS = sorted({o for page in USED for s in spans(text_of(page)) if s[:2] == "--" for o in re.split(r" (?=--)", s)})
OF_OTHERS = {"--max-restarts", "--section.key"}  # torchrun's, and no option
SOURCES = ("gpt2_triton", "benchmarks", "eval", "configs", "tests")
SHELL = {"python3", "pip", "make", "docker", "wandb", "sbatch", "torchrun", "eval/lm_eval.sh"}


def of(program):
    return [pytest.param(c, id=c.line) for c in FOUND if c.program == program]


def test_commands_are_found_and_their_programs_are_known():
    assert len(of("train")) >= 12 and len(of("tools")) >= 20 and len(of("benchmarks")) >= 3 and len(OPTIONS) >= 20
    assert {c.program for c in FOUND} <= {"train", "tools", "benchmarks", *SHELL}
    assert {c.words[0] for c in FOUND if c.program == "tools"} <= RUN | PARSED


@pytest.mark.parametrize(
    ("line", "program", "words"),
    [
        ("gpt2-triton train own --data my.txt", "train", "own --data my.txt"),
        ("python train.py x.yaml --resume", "train", "x.yaml --resume"),
        ("torchrun --nproc_per_node 8 -m gpt2_triton train a --resume", "train", "a --resume --gpus 8"),
        ("python -m gpt2_triton stats RUN", "tools", "stats RUN"),
        ("python -m benchmarks verify", "benchmarks", "verify"),
        ("pip install x", "pip", "install x"),
    ],
)
def test_lines_are_split(line, program, words):
    assert command_of(line) == Command(line, program, words.split())


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with what the commands name: texts, shards made of them, questions, a recipe, three runs."""
    directory = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "configs", directory / "configs")
    for name in ("my.txt", "tinyshakespeare.txt", "books/a.txt", "more/b.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("To be, or not to be: that is the question.\n" * 2000)
    question = dict(activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1)
    (directory / "questions.jsonl").write_text(json.dumps(question) + "\n")
    (directory / "mine.yaml").write_text("model: {size: d12}\n")
    model, config = tiny_model(model=dict(vocab_size=256), data=dict(tokenizer="bytes"))
    for run in ("mine", "other", "124m", "quickstart"):
        state = checkpoints.state(1, config=config.to_dict())
        save_checkpoint(directory / "runs" / run / "checkpoints", 1, model.state_buffers(), state, keep=1)
        (directory / "runs" / run / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5, "tokens": 1024}\n')
    (directory / "runs" / "mine" / "config.yaml").write_text(config.to_yaml())
    nanogpt_checkpoint(directory, nanogpt_content(random_params(config_of())))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert main(tools_app, "prepare text my.txt --out data/fineweb10B --tokenizer bytes --workers 1".split()) == 0
    return directory


@pytest.mark.parametrize("command", of("train"))
def test_training_commands_are_accepted(command, capsys, monkeypatch, workplace):
    monkeypatch.chdir(workplace)
    words = command.words
    shown = next((option for option in ("--plan", "--print_config", "--help") if option in words), None)
    if shown is None:
        shown = "--plan" if "--gpus" in words else "--print_config"  # which is faster, but of one GPU
        words = [*words, shown]
    assert main(train_app, words) == 0, capsys.readouterr().err
    assert {"--plan": "\narena ", "--print_config": "n_layer:", "--help": "--optim.lr"}[
        shown
    ] in capsys.readouterr().out


@pytest.mark.parametrize("command", of("tools"))
def test_tool_commands(command, capsys, monkeypatch, workplace, tmp_path):
    monkeypatch.chdir(workplace)
    name, *words = command.words
    if command.inline and len(command.words) == 1 or "..." in words:
        assert main(tools_app, [name, "--help"]) == 0
        return
    if command.inline or name in PARSED:
        assert _parses(command.words)
        return
    for download in ("dataset.prepare_dataset", "pretokenized.download"):  # run in tests/data/prepare
        monkeypatch.setattr(f"gpt2_triton.data.prepare.{download}", lambda *arguments, **named: None)
    for option in ("--out", "-o", "--json"):  # in a directory of this test: one that is not empty would be refused
        if option in words:
            at = words.index(option) + 1
            words[at] = str(tmp_path / words[at].replace("/", "_"))
    if name in ("sample", "perplexity"):  # in the interpreter a forward pass takes half a second
        if "--tokens" not in words:
            words += ["--tokens", ""]
        words[words.index("--tokens") + 1] = "3" if name == "sample" else "32"
    if "--num" in words:
        words[words.index("--num") + 1] = "2"
    if name == "prepare" and words[0] == "text":
        words += ["--workers", "1"]
    if name == "hellaswag" and "--data" not in words:
        words += ["--data", "questions.jsonl"]
    assert main(tools_app, [name, *words]) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    if name == "sample":
        assert words[words.index("--prompt") + 1] in printed
    if name == "plot":
        assert next(tmp_path.glob("*.png")).read_bytes().startswith(b"\x89PNG")


def _parses(words):
    """Parse a command of the tools without running it; cyclopts raises for unknown options and missing values."""
    _, bound, _ = tools_app.parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments


@pytest.mark.parametrize("command", of("benchmarks"))
def test_benchmark_commands_parse(command, capsys, monkeypatch):
    monkeypatch.setattr(device, "present", lambda: False)
    if command.words[0] == "verify":
        assert main(benchmarks_app, [*command.words, "--help"]) == 0
    else:
        assert main(benchmarks_app, command.words) == 2
        assert capsys.readouterr().err == f"error: {command.words[0]}: needs a CUDA GPU, found none\n"


@pytest.mark.parametrize("command", [c for program in sorted(SHELL) for c in of(program)])
def test_shell_commands_name_what_exists(command):
    """Files, extras and targets in them exist; they are not run: they need a network, root or a cluster."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[(\w+)\]", command.line.replace("lm-eval[hf]", "")):
        assert extras in project["optional-dependencies"]
    for pinned in re.findall(r"(\S+==\S+)", command.line):
        assert any(pinned in extra for extra in project["optional-dependencies"].values())
    for file in re.findall(r"(?:configs|eval)/[\w.]+", command.line):
        assert (ROOT / file).is_file()
    if command.program == "make":
        assert re.search(rf"^{command.words[0]}:", (ROOT / "Makefile").read_text(), re.M)


def _of_training(option):
    return option.split()[0][2:].partition("=")[0] in KEYS | {*FLAGS}


@pytest.mark.parametrize("option", [o for o in OPTIONS if _of_training(o) and o.split()[0] not in OF_OTHERS])
def test_options_in_the_text_are_accepted(option, capsys):
    """`--key a|b` names each of its values; one without a value names the key."""
    name, _, values = option.partition(" ")
    if not values or values in ("RUN", "FILE") or name in ("--data", "--run_dir", "--resume"):
        assert name[2:].partition("=")[0] in KEYS | {*FLAGS}
        return
    for value in values.split("|"):
        words = [name, *value.split()]
        plan = ["--plan"] if name in ("--gpu", "--gpus") else ["--print_config"]
        assert main(train_app, ["gpt2_124m", *words, *plan]) == 0, option
        printed = capsys.readouterr().out
        section, _, key = name[2:].partition(".")
        if section in SECTIONS and key != "size":  # printed as the keys that it expands to
            found = yaml.safe_load(printed)[section][key]
            assert found == type(found)(value)


@pytest.fixture(scope="module")
def help_of_all_tools():
    """Return what `--help` prints for every command that the pages name, of tools and of benchmarks."""
    words = {tuple(c.words[: 2 if c.words[0] == "prepare" else 1]) for c in FOUND if c.program == "tools"}
    words = {word for word in words if word[0] != "--version" and "..." not in word}
    calls = [["-m", "gpt2_triton", *word] for word in sorted(words)]
    calls += [["-m", "benchmarks", c.words[0]] for c in FOUND if c.program == "benchmarks"]
    with pytest.MonkeyPatch.context() as patch:
        for app in (tools_app, benchmarks_app):
            patch.setattr(app, "console", Console(width=120))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for _, package, *command in calls:
                assert main(tools_app if package == "gpt2_triton" else benchmarks_app, [*command, "--help"]) == 0
    return printed.getvalue()


@pytest.mark.parametrize("option", [o for o in OPTIONS if not _of_training(o) and o.split()[0] not in OF_OTHERS])
def test_options_of_tools_in_the_text_are_known(option, help_of_all_tools):
    assert re.search(rf"{option.split()[0]}\b", help_of_all_tools)


@pytest.mark.parametrize("page", [p for p in USED if p.name != "api.md"], ids=lambda page: page.name)
def test_keys_in_the_text_exist(page):
    named = {
        s.split()[0] for s in spans(text_of(page)) if re.match(r"(\w+)\.\w", s) and s.partition(".")[0] in SECTIONS
    }
    files = {name for name in named if name.endswith((".py", ".json", ".jsonl", ".bin", ".safetensors", ".sbatch"))}
    assert named - files <= KEYS


def test_sweep_of_the_guide_is_accepted(capsys):
    """wandb's agent replaces ${args} by --key=value for each parameter."""
    (block,) = blocks(text_of(ROOT / "docs" / "guide" / "logging.md"), "yaml")
    sweep = yaml.safe_load(block)
    one = {key: next(v for k, v in found.items() if k != "distribution") for key, found in sweep["parameters"].items()}
    words = sweep["command"][2:-1] + [f"--{key}={v[0] if isinstance(v, list) else v}" for key, v in one.items()]
    assert sweep["command"][:2] == ["gpt2-triton", "train"] and sweep["command"][-1] == "${args}"
    assert main(train_app, [*words, "--print_config"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["optim"]["lr"] == 6e-4


def test_options_of_other_projects_map_to_known_keys():
    page = text_of(ROOT / "docs" / "guide" / "interop.md")
    cells = [line.split("|")[-2] for line in page.partition("## Options")[2].splitlines() if line.startswith("| ")]
    names = [name for cell in cells[1:] for name in re.findall(r"`([^`]+)`", cell)]
    known = KEYS | {f"--{flag}" for flag in FLAGS}
    assert len(names) >= 30 and {name.split()[0] for name in names} <= known


# ---- length, links, files, promises ----


def test_readme_has_at_most_1000_words():
    assert len(text_of(README).split()) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page):
    broken = []
    for link in links(text_of(page)):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or anchor and anchor not in anchors(text_of(target)):
            broken.append(link)
    assert not broken


def test_anchors_are_github_s():
    assert anchors("# Start from GPT-2's weights\n## A `key`, or two\n") == {
        "start-from-gpt-2s-weights",
        "a-key-or-two",
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_in_the_text_exist(page):
    pattern = r"(?:tests|docs|benchmarks|configs|eval|gpt2_triton)/[\w/.]*"
    named = {span for span in spans(text_of(page)) if re.fullmatch(pattern, span) and "NAME" not in span}
    assert not [path for path in named if not (ROOT / path).exists()]


def test_messages_in_the_troubleshooting_are_those_of_the_package():
    """Numbers, `...` and N stand for values; the words between them are in one string of the source."""
    of_others = {"requires a different Python", "No module named 'triton'", "Failed to find C compiler", "fatal error"}
    of_others |= {"address already in use"}
    composed = {"has metrics up to step", "is not responding"}  # of more than one string
    source = "".join(path.read_text() for path in (ROOT / "gpt2_triton").rglob("*.py"))
    rows = [line for line in text_of(ROOT / "docs/guide/troubleshooting.md").splitlines() if line.startswith("| ")]
    messages = [span for row in rows for span in spans(row.split("|")[1])]
    parts = {part.strip() for text in messages for part in re.split(r"\S*\d\S*|\S*\.\.\.|\bN\b|[;,:]", text)}
    parts = {part for part in parts if len(part.split()) > 1}
    assert len(parts) >= 25 and not [part for part in parts - of_others - composed if part not in source]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_rows_of_a_table_have_equal_numbers_of_cells(page):
    """A | in inline code divides a cell too, unless it is written as \\|."""
    wrong = []
    for table in re.findall(r"(?:^\|.*\|$\n?)+", FENCE.sub("", text_of(page)), re.M):
        rows = table.splitlines()
        wrong += [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != rows[0].count("|")]
    assert not wrong


def test_pages_that_sources_name_exist():
    """Comments, docstrings and messages name pages as docs/.../NAME.md."""
    files = [path for top in SOURCES for path in (ROOT / top).rglob("*")]
    sources = [path for path in files if path.suffix in (".py", ".yaml", ".sbatch")]
    named = {(path, page) for path in sources for page in re.findall(r"docs/[\w/]+\.md", path.read_text())}
    assert len(named) >= 10
    assert not {f"{path.relative_to(ROOT)}: {page}" for path, page in named if not (ROOT / page).exists()}


def test_every_page_is_in_the_index():
    index = ROOT / "docs" / "README.md"
    listed = {(index.parent / link).resolve() for link in links(text_of(index).partition("\n## Guide\n")[2])}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} == listed


def test_every_picture_is_on_a_page():
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(text_of(page)) if link.endswith(".png")}
    assert shown == {*(ROOT / "docs").rglob("*.png")}


def test_every_promise_has_a_test():
    page = text_of(ROOT / "docs" / "engineering" / "promises.md")
    rows = [line.split("|")[1:3] for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 20
    for promise, tests in rows:
        named = re.findall(r"`((?:tests|benchmarks)/[\w/.]+)`", tests)
        assert named, promise
        for path in named:
            files = [ROOT / path] if path.endswith(".py") else [*(ROOT / path).rglob("test_*.py")]
            assert files and all("\ndef test_" in f.read_text() or path.startswith("benchmarks") for f in files), path


def test_every_case_of_reliability_names_tests_that_exist():
    page = text_of(ROOT / "docs" / "engineering" / "reliability.md")
    rows = [line.split(" | ") for line in page.splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row[0].strip("| ")) for row in rows] == list(range(1, 62))
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row[-1])
        assert named or "chaos" in row[-1], row
        for file, name in named:
            assert f"def test_{name}(" in text_of(ROOT / "tests" / file), f"{file}::{name}"


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["quickstart", "test", "verify"])
def test_make_targets_run_commands_that_exist(target, capsys):
    """`make -n` prints what a target would run."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        if "train.py" in line:
            assert main(train_app, [str(ROOT / shlex.split(line)[2]), "--print_config"]) == 0
        elif "-m gpt2_triton" in line:
            assert main(tools_app, [*shlex.split(line)[3:], "--help"]) == 0
        elif "-m benchmarks " in line:
            assert main(benchmarks_app, [*shlex.split(line)[3:], "--help"]) == 0


@pytest.mark.parametrize("page", [README, ROOT / "docs" / "guide" / "api.md"], ids=lambda page: page.stem)
def test_python_on_the_pages_runs(page, workplace, monkeypatch, capsys):
    """`train` returns a run of the workplace here: the quickstart takes minutes, and has a test of its own."""
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(gpt2_triton, "train", lambda *_, **__: gpt2_triton.Run("runs/mine"))
    (block,) = blocks(text_of(page), "python")
    exec(block.replace("tokens=48", "tokens=2").replace(" the number of items in a container", ""), {})
    assert capsys.readouterr().out
