"""Commands, options, keys, links and files on README.md and the guide's pages are real.

A command runs to its end where that takes seconds on a CPU, else it is parsed.  Others run steps of
training (tests/training/test_quickstart.py) and the benchmarks (tests/benchmarks/).
"""

import contextlib
import io
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from inspect import signature
from pathlib import Path

import pytest
from rich.console import Console

import gpt2_triton
from benchmarks.__main__ import app as benchmarks_app
from benchmarks.losses import pairs
from benchmarks.pictures import LOSSES
from gpt2_triton import device
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.commands import tools as tools_app
from gpt2_triton.commands.app import main
from gpt2_triton.commands.train import app as train_app
from gpt2_triton.commands.train import train
from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import options
from tests.support import checkpoints
from tests.support.foreign import (
    config_of,
    nanogpt_checkpoint,
    nanogpt_content,
    random_params,
    weights_of,
)
from tests.support.pages import (
    GUIDE,
    PAGES,
    README,
    ROOT,
    anchors,
    blocks,
    commands,
    links,
    spans,
    text_of,
)
from tests.support.tiny import tiny_model
from tests.support.tokenizer_files import byte_level

USED = [README, *GUIDE]
KEYS = {key for key, _ in options()}
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
# each once
FOUND = {(c.line, c.inline): c for page in USED for c in commands(text_of(page))}.values()
# tools that run to their end on tiny data
RUN = {*"prepare sample export hellaswag perplexity plot configs --version tokenizer".split()}
PARSED = {"stats", "compile"}
OPTIONS = sorted(
    {
        o
        for page in USED
        for s in spans(text_of(page))
        if s[:2] == "--"
        for o in re.split(r" (?=--)", s)
    }
)
# torchrun's, and no option
OF_OTHERS = {"--max-restarts", "--nproc_per_node", "--signals-to-handle", "--section.key"}
SOURCES = ("gpt2_triton", "benchmarks", "eval", "configs", "tests")
SHELL = {*"git python3 pip make docker wandb sbatch torchrun eval/lm_eval.sh".split()}


def of(program):
    return [pytest.param(c, id=c.line) for c in FOUND if c.program == program]


def test_commands_are_found_and_their_programs_are_known():
    assert (
        len(of("train")) >= 12
        and len(of("tools")) >= 20
        and len(of("benchmarks")) >= 3
        and len(OPTIONS) >= 20
    )
    assert {c.program for c in FOUND} <= {"train", "tools", "benchmarks", *SHELL}
    assert {c.words[0] for c in FOUND if c.program == "tools"} <= RUN | PARSED


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A directory with what the commands name: texts, shards made of them,
    questions, a recipe, three runs.
    """
    directory = tmp_path_factory.mktemp("workplace")
    shutil.copytree(ROOT / "configs", directory / "configs")
    for name in ("my.txt", "tinyshakespeare.txt", "books/a.txt", "more/b.txt"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text("To be, or not to be: that is the question.\n" * 2000)
    question = dict(
        activity_label="a", ctx_a="To be", ctx_b="or", ctx="To be or", endings=[*"abcd"], label=1
    )
    (directory / "questions.jsonl").write_text(json.dumps(question) + "\n")
    (directory / "mine.yaml").write_text("model: {size: d12}\n")
    model, config = tiny_model(model=dict(vocab_size=256), data=dict(tokenizer="bytes"))
    tensors, state = {"params": model.state.params}, checkpoints.state(1, config=config.to_dict())
    for run in ("mine", "other", "124m", "quickstart"):
        save_checkpoint(directory / "runs" / run / "checkpoints", 1, tensors, state, Retention(1))
        (directory / "runs" / run / "metrics.jsonl").write_text(
            '{"step": 1, "loss": 5.5, "tokens": 1024}\n'
        )
    (directory / "runs" / "mine" / "config.yaml").write_text(config.to_yaml())
    sources = {
        "models/Llama-3.2-1B": dict(arch="llama"),
        "models/Qwen3-0.6B": dict(arch="llama", qk_norm=True),
        "openai-community/gpt2": {},
    }
    for name, sizes in sources.items():
        model, _ = tiny_model(model=sizes)
        export(weights_of(model), directory / name, "hf", "bf16")
    for name in ("models/SmolLM2-135M", "models/SmolLM2-135M-Instruct", "tok"):
        byte_level(directory / name)
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    (directory / "models" / "SmolLM2-135M-Instruct" / "chat_template.jinja").write_text(template)
    (directory / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    nanogpt_checkpoint(directory, nanogpt_content(random_params(config_of())))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        assert (
            main(
                tools_app,
                "prepare text my.txt --out data/fineweb10B --tokenizer bytes --workers 1".split(),
            )
            == 0
        )
    for source in ("web", "code"):
        shutil.copytree(directory / "data" / "fineweb10B", directory / source)
    return directory


@pytest.mark.parametrize("command", of("train"))
def test_training_commands_are_accepted(command, capsys, monkeypatch, workplace):
    monkeypatch.chdir(workplace)
    words = command.words
    shown = next(
        (option for option in ("--plan", "--print_config", "--help") if option in words), None
    )
    if shown is None:
        # which is faster, but of one GPU
        shown = "--plan" if "--gpus" in words else "--print_config"
        words = [*words, shown]
    assert main(train_app, words) == 0, capsys.readouterr().err
    said = {"--plan": "\nmemory ", "--print_config": "n_layer:", "--help": "--optim.lr"}[shown]
    assert said in capsys.readouterr().out


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
    # tests/data/prepare
    for made in ("dataset.prepare_dataset", "pretokenized.download", "nanogpt.prepare_nanogpt"):
        monkeypatch.setattr(f"gpt2_triton.data.prepare.{made}", lambda *arguments, **named: None)
    # in a directory of this test: one that is not empty would be refused
    for option in ("--out", "-o", "--json"):
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
    """Parse a command of the tools without running it; cyclopts raises for unknown
    options and missing values.
    """
    _, bound, _ = tools_app.parse_args(words, exit_on_error=False, print_error=False)
    return bound.arguments


@pytest.mark.parametrize("command", of("benchmarks"))
def test_benchmark_commands_parse(command, capsys, monkeypatch):
    monkeypatch.setattr(device, "present", lambda: False)
    if command.words[0] == "verify":
        assert main(benchmarks_app, [*command.words, "--help"]) == 0
    else:
        assert main(benchmarks_app, command.words) == 2
        assert (
            capsys.readouterr().err == f"error: {command.words[0]}: needs a CUDA GPU, found none\n"
        )


@pytest.mark.parametrize("command", [c for program in sorted(SHELL) for c in of(program)])
def test_shell_commands_name_what_exists(command):
    """Files, extras and targets in them exist; they are not run: they need a
    network, root or a cluster.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[(\w+)\]", command.line.replace("lm-eval[hf]", "")):
        assert extras in project["optional-dependencies"]
    for pinned in re.findall(r"(\S+==\S+)", command.line):
        assert any(pinned in extra for extra in project["optional-dependencies"].values())
    for file in re.findall(r"(?:configs|eval)/[\w.]+", command.line):
        assert (ROOT / file).is_file()
    if command.program == "make":
        assert re.search(rf"^{command.words[0]}:", (ROOT / "Makefile").read_text(), re.M)


@pytest.fixture(scope="module")
def help_of_all_tools():
    """Return what `--help` prints for every command that the pages name,
    of tools and of benchmarks.
    """
    words = {
        tuple(c.words[: 2 if c.words[0] == "prepare" else 1]) for c in FOUND if c.program == "tools"
    }
    words = {word for word in words if word[0] != "--version" and "..." not in word}
    calls = [["-m", "gpt2_triton", *word] for word in sorted(words)]
    calls += [["-m", "benchmarks", c.words[0]] for c in FOUND if c.program == "benchmarks"]
    with pytest.MonkeyPatch.context() as patch:
        for app in (tools_app, benchmarks_app):
            patch.setattr(app, "console", Console(width=120))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            for _, package, *command in calls:
                assert (
                    main(
                        tools_app if package == "gpt2_triton" else benchmarks_app,
                        [*command, "--help"],
                    )
                    == 0
                )
    return printed.getvalue()


def test_options_in_the_text_are_known(help_of_all_tools):
    names = {option.split()[0].partition("=")[0] for option in OPTIONS} - OF_OTHERS
    unknown = {name for name in names if name[2:] not in KEYS | {*signature(train).parameters}}
    assert {name for name in unknown if not re.search(rf"{name}\b", help_of_all_tools)} == set()


@pytest.mark.parametrize(
    "page", [p for p in USED if p.name != "api.md"], ids=lambda page: page.name
)
def test_keys_in_the_text_exist(page):
    named = {
        s.split()[0]
        for s in spans(text_of(page))
        if re.match(r"(\w+)\.\w", s) and s.partition(".")[0] in SECTIONS
    }
    files = {
        name
        for name in named
        if name.endswith((".py", ".json", ".jsonl", ".bin", ".safetensors", ".sbatch"))
    }
    assert named - files <= KEYS


# ---- links and files ----


def test_links_and_anchors_exist():
    broken = []
    for page in PAGES:
        for link in links(text_of(page)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            is_known = target.exists() and (not anchor or anchor in anchors(text_of(target)))
            if not is_known and not link.startswith(("http://", "https://")):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert not broken


def test_files_in_the_text_and_pages_in_the_sources_exist():
    pattern = r"(?:tests|docs|benchmarks|configs|eval|gpt2_triton)/[\w/.]*"
    named = {
        (page, s)
        for page in PAGES
        for s in spans(text_of(page))
        if re.fullmatch(pattern, s) and "NAME" not in s
    }
    files = [
        path
        for top in SOURCES
        for path in (ROOT / top).rglob("*")
        if path.suffix in (".py", ".yaml", ".sbatch")
    ]
    named |= {
        (path, page) for path in files for page in re.findall(r"docs/[\w/]+\.md", path.read_text())
    }
    missing = {
        f"{path.relative_to(ROOT)}: {name}" for path, name in named if not (ROOT / name).exists()
    }
    assert not missing and len(named) >= 50


def test_tests_that_pages_name_exist():
    """As `data/test_shards.py::name`, below tests/ and without `test_`."""
    engineering = sorted((ROOT / "docs" / "engineering").glob("*.md"))
    named = {
        found
        for page in engineering
        for found in re.findall(r"`([\w/]+\.py)::(\w+)`", text_of(page))
    }
    files = {file: (ROOT / "tests" / file) for file, _ in named}
    sources = {file: path.read_text() if path.exists() else "" for file, path in files.items()}
    assert {
        f"{file}::{name}" for file, name in named if f"def test_{name}(" not in sources[file]
    } == set()


def test_every_page_is_in_the_index_and_every_picture_on_a_page():
    index = ROOT / "docs" / "README.md"
    listed = {(page.parent / link).resolve() for page in PAGES for link in links(text_of(page))}
    assert {page for page in (ROOT / "docs").rglob("*.md") if page != index} <= {
        (index.parent / link).resolve() for link in links(text_of(index))
    }
    assert {*(ROOT / "docs").rglob("*.png")} <= listed


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("target", ["quickstart", "test", "verify"])
def test_make_targets_run_commands_that_exist(target):
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


def test_the_yaml_file_of_the_guide_is_a_configuration_and_its_first_half_the_defaults(tmp_path):
    (block,) = blocks(text_of(ROOT / "docs" / "guide" / "training.md"), "yaml")
    (tmp_path / "mine.yaml").write_text(block)
    config, default = Config.load(tmp_path / "mine.yaml"), Config()
    for section in ("model", "data", "train", "optim"):
        assert getattr(config, section) == getattr(default, section)
    assert config.log.wandb_tags == "fineweb,adamw" and config.eval.hellaswag_every > 0


@pytest.mark.parametrize(
    ("name", "series"), [("gpt2_124m_fast", "steps_524k"), ("modern_124m", "modern")]
)
def test_a_recipe_with_muon_has_the_keys_of_its_search_but_the_rates(name, series):
    recipe, arms = Config.load(name), pairs.read_series(LOSSES / f"{series}.yaml").arms
    searched = [arm for key, arm in arms.items() if ", rate " in key]
    warmup = round(0.1 * recipe.train.steps)
    rates = {"lr": recipe.optim.lr, "adamw_lr": recipe.optim.adamw_lr, "warmup": warmup}
    for arm in searched:
        run = Config.load("gpt2_124m", arm.options)
        assert recipe.optim == run.replace(optim=rates).optim
        assert recipe.train.step_tokens == run.train.step_tokens
        # the cap came after the search
        assert recipe.model.model_copy(update={"logit_cap": 0.0}) == run.model


@pytest.mark.parametrize(
    "page",
    [README, *(ROOT / "docs" / "guide" / name for name in ("api.md", "data.md"))],
    ids=lambda page: page.stem,
)
def test_python_on_the_pages_runs(page, workplace, monkeypatch, capsys):
    """`train` returns a run of the workplace here: the quickstart takes minutes,
    and has a test of its own.
    """
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(gpt2_triton, "train", lambda *_, **__: gpt2_triton.Run("runs/mine"))
    scope = {}
    for block in blocks(text_of(page), "python"):
        exec(block.replace("tokens=48", "tokens=2").replace(" letter a with tilde", ""), scope)
        assert capsys.readouterr().out
    if page.name == "data.md":
        assert Path("chats_as_text.jsonl").read_text() == '{"text": "<|im_start|>Hi<|im_end|>"}\n'
    if page.name == "api.md":
        with gpt2_triton.load("runs/mine") as model:
            of_tokens = scope["losses"](model, "T", "he cat")
            want = model.loss(model.encode("The cat"))
        assert of_tokens.shape == (6,) and float(of_tokens.mean()) == pytest.approx(want, rel=1e-5)
