"""The command line: exit codes, one line per mistake, the arguments of the
functions behind the commands.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gpt2_triton import __version__, device, errors
from gpt2_triton.commands import app, plan
from gpt2_triton.commands import run as run_command
from gpt2_triton.commands import tools as tools_app
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.commands.train import app as train_app
from gpt2_triton.commands.train import parse_overrides
from gpt2_triton.config.config import Config
from gpt2_triton.errors import ConfigError
from gpt2_triton.training import preemption, trainer
from tests.support.commands import run_tool, run_train
from tests.support.tokenizer_files import byte_level

ROOT = Path(__file__).parents[2]

MISTAKES = [  # words after train.py, part of the message
    ("", "CONFIG requires an argument; see --help"),
    ("--data my.txt", "CONFIG requires an argument"),
    ("nope", "nope: neither a file nor a recipe; recipes: finetune_shakespeare, gpt2_124m,"),
    ("onw --data my.txt", "onw: neither a file nor a recipe; did you mean own?"),
    (
        "my.txt",
        "my.txt: text, no configuration; `python -m gpt2_triton train "
        "own --data my.txt` trains on it",
    ),
    ("missing.yaml", "missing.yaml: cannot read the configuration: No such file"),
    # JSON is YAML, and not only text
    ("missing.json", "missing.json: neither a file nor a recipe"),
    ("x.yaml --lr=1", "--lr: unknown option; did you mean --optim.lr?"),
    (
        "x.yaml --learning_rate=1",
        "--learning_rate: unknown option; for nanoGPT's learning_rate use optim.lr",
    ),
    ("x.yaml --hidden_size=1", "--hidden_size: unknown option; train --help lists them"),
    (
        "x.yaml --epochs=1",
        "--epochs: unknown option; use train.steps; a run says at its start how many epochs",
    ),
    ("x.yaml --n_layers=1", "--n_layers: unknown option; did you mean --model.n_layer?"),
    (
        "-i train.bin -b 4",
        "-i: unexpected; for llm.c's -i use data.train; the YAML file comes before all",
    ),
    (
        "--optim.lr=0.0003 x.yaml",
        "--optim.lr=0.0003: unexpected; the YAML file comes before all keys",
    ),
    (
        "x.yaml --run_dir ''",
        "after --run_dir: empty, perhaps from an unset variable; give a path",
    ),
    ("x.yaml --run_dir=", "--run_dir=: empty, perhaps from an unset variable"),
    ("x.yaml --paln", "--paln: unknown option; did you mean --plan?"),
    ("x.yaml --optim.lr --train.steps 3", "--optim.lr: expected a value after it"),
    ("x.yaml --optim.lr 1 --optim.lr=2", "--optim.lr: given twice"),
    ("x.yaml optim.lr=3", "optim.lr=3: unexpected; options are --section.key value"),
    (
        "x.yaml --data.train a.bin b.bin",
        "lr 3e-4; quote a pattern, as in 'train_*.bin'\n",
    ),
    (
        "x.yaml --data.train a.bin -o b",
        "-o: unexpected; for llm.c's -o use --run_dir",
    ),
    ("x.yaml --optim.lr -1", "optim.lr: must be greater than 0, got '-1'"),
    ("x.yaml --optim.weight-decay x", "optim.weight_decay: must be a valid number"),
    ("x.yaml --model.n_head 5", "model.n_head: 5 heads do not divide n_embd 128"),
    (
        "x.yaml --train.batch_size=3 --train.total_batch_tokens=1024",
        "in a new run, total_batch_tokens to 768",
    ),
    ("x.yaml --gpu h200", "--gpu, --gpus, --buffers: go with --plan only"),
    ("x.yaml --buffers", "--gpu, --gpus, --buffers: go with --plan only"),
    ("x.yaml --resume True", "; --resume takes nothing, or must"),
    ("x.yaml --run_dir old --resume=may", 'Invalid value "may" for --resume'),
    ("x.yaml --plan --gpus 0", 'Invalid value "0" for --gpus. Must be >= 1; see --help'),
    ("x.yaml --plan --gpu gh200", "mi355x, 7900xtx, or its memory, as 24GiB; got gh200"),
    ("x.yaml --plan --gpu A10G", "mi355x, 7900xtx, or its memory, as 24GiB; got A10G"),
    ("x.yaml --plan --gpu A100", "--gpu: expected a100-40, a100-80, or its memory, "),
    ("x.yaml --resume", "--resume: needs --run_dir"),
    ("x.yaml --run_dir x.yaml", "--run_dir: x.yaml is a file"),
    (
        "x.yaml --run_dir old",
        "--run_dir: old has checkpoints up to step_00000020; add --resume",
    ),
    (
        "x.yaml --run_dir .",
        "--run_dir: a run would write over config.yaml; move it, or choose another",
    ),
    ("x.yaml --run_dir", "--run_dir requires an argument"),
    ("x.yaml --plan=perhaps", 'unable to convert "perhaps" into bool'),
]


@pytest.fixture
def here(tmp_path, monkeypatch, request):
    """An empty working directory with x.yaml, the quickstart, and a run `old` with checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(
        (request.config.rootpath / "configs" / "quickstart.yaml").read_text()
    )
    (tmp_path / "config.yaml").touch()  # of the user
    (tmp_path / "my.txt").write_text("To be, or not to be\n")
    for step in (10, 20):
        (tmp_path / "old" / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """The arguments of each call of trainer.train, which does nothing else."""
    calls = []
    monkeypatch.setattr(trainer, "train", lambda *arguments: calls.append(arguments) or 0)
    return calls


def run(function):
    """Return main's exit code for an app that only calls the function."""
    test_app = make_app("test", "")
    test_app.default(function)
    return main(test_app, [])


def test_importing_the_commands_imports_no_torch_and_no_numpy():
    """Both read environment variables that select_device sets."""
    program = (
        "import sys, gpt2_triton.__main__, gpt2_triton.commands.train, benchmarks.__main__;"
        "print({'torch', 'numpy'} & sys.modules.keys())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_train_reports_a_mistake_in_one_line_with_exit_code_2(here, capsys, line, message):
    assert run_train(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and message in err and len(err.splitlines()) == 1 and err.startswith("error: ")


def test_train_names_all_wrong_options_at_once(here, capsys):
    assert run_train("x.yaml -x 9 --max_iters 9 --lr=1 --optim.lr") == 2
    err = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1] for line in err] == ["-x", "--max_iters", "--lr", "--optim.lr"]


@pytest.mark.parametrize(
    "line", ["\x1b[2J.yaml", "x.yaml --\x9b2J=1", "x.yaml --data.val \udcff\x07"]
)
def test_errors_escape_control_characters(here, capsys, line):
    assert run_train(line) in (2, 3)
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "\\x" in err and not set(err) & set("\x1b\x9b\x07\udcff")


def test_the_first_process_of_a_container_ends_by_sigterm():
    program = (
        "import os; from gpt2_triton.commands.app import main, make_app; app = make_app('a');"
        "app.default(lambda: os.kill(1, 15)); main(app, [])"
    )
    words = ["unshare", "-Urpf", sys.executable, "-c", program]
    ran = subprocess.run(words, capture_output=True, text=True)
    if "unshare" in ran.stderr:
        pytest.skip("no namespaces here")
    assert ran.returncode == 143


def test_train_passes_config_run_dir_and_resume(here, trained):
    assert run_train("x.yaml --optim.lr=2e-4 --run-dir old --resume --sample.prompt a-b") == 0
    config, run_dir, resume, _ = trained.pop()
    assert (config.optim.lr, config.sample.prompt, run_dir, resume) == (
        2e-4,
        "a-b",
        Path("old"),
        True,
    )
    assert run_train("x.yaml") == 0
    [(_, run_dir, resume, _)] = trained
    assert re.fullmatch(r"runs/x-\d{8}-\d{6}", run_dir.as_posix()) and resume is False


def test_home_is_expanded_where_the_shell_leaves_it(here, trained, monkeypatch, capsys):
    monkeypatch.setenv("HOME", str(here / "home"))
    words = "--data.train=~/a_*.bin --data.val ~/v.bin --init_from hf:~/m '--sample.prompt=~/b is'"
    assert run_train(f"x.yaml --run-dir=~/r {words}") == 0
    [(config, run_dir, *_)] = trained
    found = (str(run_dir), config.data.train, config.data.val, config.init_from.removeprefix("hf:"))
    assert found == tuple(f"{here}/home/{name}" for name in ("r", "a_*.bin", "v.bin", "m"))
    assert config.sample.prompt == "~/b is"
    assert run_tool("sample nanogpt:~/ckpt.pt") == 4
    assert f"nanogpt:{here}/home/ckpt.pt: " in capsys.readouterr().err


@pytest.mark.parametrize(("everywhere", "rank", "line"), [
    (True, 0, "error: cut off\n"), (True, 1, ""), (False, 0, "error: rank 0: cut off\n"),
    (False, 1, "error: rank 1: cut off\n"), (True, 2, "error: rank 2: cut off\n"), (True, 3, ""),
])  # fmt: skip
def test_error_of_every_rank_is_printed_once_a_host(monkeypatch, capsys, everywhere, rank, line):
    """Two hosts of two ranks."""

    def command():
        error = errors.DataError("cut off")
        error.on_every_rank = everywhere
        raise error

    monkeypatch.setattr(os, "_exit", lambda code: None)
    monkeypatch.setattr(app.time, "sleep", lambda seconds: None)
    for name, value in dict(RANK=rank, LOCAL_RANK=rank % 2, WORLD_SIZE=4).items():
        monkeypatch.setenv(name, str(value))
    assert run(command) == 3
    assert capsys.readouterr().err == line


@pytest.mark.parametrize(("words", "expected"), [
    ("x.yaml --resume must", "must"),
    ("--resume must x.yaml --optim.lr 1", "must"),
    ("x.yaml --resume=must", "must"),
    ("--resume x.yaml", True),
    ("x.yaml --resume --optim.lr 1", True),
])  # fmt: skip
def test_train_takes_resume_as_a_flag_or_with_must(here, trained, words, expected):
    for one, first in ((train_app, []), (tools_app, ["train"])):
        assert main(one, [*first, *words.split(), "--run_dir", "old"]) == 0
    assert [resume for _, _, resume, _ in trained] == [expected] * 2


def test_two_starts_in_one_second_have_a_directory_each(here, monkeypatch):
    """The first has not written anything when the second starts, and the third."""
    used = []

    def train(_, run_dir, *__):
        used.append(run_dir.name)
        return run_train("x.yaml") if len(used) < 3 else 0

    monkeypatch.setattr(trainer, "train", train)
    monkeypatch.setattr(app.time, "strftime", lambda _: "20261122-150000")
    assert run_train("x.yaml") == 0
    assert used == ["x-20261122-150000", "x-20261122-150000-2", "x-20261122-150000-3"]
    assert os.listdir("runs") == []


@pytest.mark.parametrize("split", ["train", "val"])
def test_train_refuses_shards_of_another_tokenizer(here, trained, capsys, split):
    keys = {"train": "a.bin", "val": "a.bin", split: "others/a.bin"}
    (here / "others").mkdir()
    for path in {*keys.values()}:
        (here / path).touch()
    line = f"x.yaml --data.train {keys['train']} --data.val {keys['val']}"
    assert run_train(line) == 0
    (here / "others" / "shards.json").write_text('{"tokenizer": "gpt2"}')
    assert run_train(line) == 3 and len(trained) == 1
    assert "others/shards.json: made with another tokenizer, gpt2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run_dir", "holds", "stays"), [("new", [], False), ("new", ["a"], True), ("own", [], True)]
)
def test_failed_start_removes_its_empty_run_dir(here, monkeypatch, run_dir, holds, stays):
    def train(_, run_dir, *__):
        assert run_dir.is_dir()
        for name in holds:
            (run_dir / name).touch()
        raise errors.DataError("no file matches")

    monkeypatch.setattr(trainer, "train", train)
    (here / "own").mkdir()
    assert run_train(f"x.yaml --run_dir {run_dir}") == 3
    assert (here / run_dir).exists() == stays


OURS = [
    error
    for error in errors.UserError.__subclasses__()
    if error.__module__.startswith("gpt2_triton")
]


def test_user_errors_and_interrupts_have_exit_codes(capsys):
    def command(error):
        raise error

    found = {
        error.__name__: run(lambda error=error: command(error("what happened"))) for error in OURS
    }
    assert found == {
        "ConfigError": 2,
        "DataError": 3,
        "CheckpointError": 4,
        "OutOfMemoryError": 5,
        "NonFiniteError": 6,
        "PeerLostError": 1,
        "ReplicaMismatchError": 1,
        "FileError": 2,
    }
    assert capsys.readouterr().err == "error: what happened\n" * 8
    assert run(lambda: command(KeyboardInterrupt)) == 130 and run(lambda: 143) == 143
    assert capsys.readouterr().err == "error: interrupted\n"
    assert run(lambda: command(PermissionError(13, "Permission denied", "RUN/metrics.jsonl"))) == 2
    assert "RUN/metrics.jsonl: Permission denied; " in capsys.readouterr().err
    assert run(lambda: command(FileNotFoundError(2, "No such file or directory", "/proc/x"))) == 2
    assert "/proc/x: No such file or directory; choose another" in capsys.readouterr().err
    assert run(lambda: command(OSError(28, "No space left on device"))) == 2
    said = "error: standard output, or a file: No space left on device; make room\n"
    assert capsys.readouterr().err == said
    # HOME=/, as in a container
    assert run(lambda: command(PermissionError(13, "Permission denied", "/.triton"))) == 2
    assert "Permission denied; set TRITON_CACHE_DIR" in capsys.readouterr().err
    with pytest.raises(AssertionError, match="a bug"):
        run(lambda: command(AssertionError("a bug")))


def test_the_page_lists_every_exit_code():
    page = (ROOT / "docs" / "guide" / "training.md").read_text().partition("## Exit codes\n")[2]
    listed = re.findall(r"^\| ([0-9, ]+) \|", page, re.MULTILINE)
    found = {int(code) for cells in listed for code in cells.split(",")}
    assert found == {error.exit_code for error in OURS} | {0, 141}
    signals = re.search(r"^\| 128 \+ N \| stopped by signal N: ([0-9, ]+) \|", page, re.MULTILINE)[
        1
    ]
    assert {int(code) for code in signals.split(",")} == {
        128 + number for number in preemption.NUMBERS
    }


def test_a_recipe_in_place_of_a_command_names_what_to_use(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpt2-triton", "own", "--data", "my.txt"])
    assert run_command() == 2
    said = "error: own is a recipe; use `gpt2-triton train own`\n"
    assert capsys.readouterr().err == said


def test_print_config_prints_a_complete_config(here, capsys):
    assert run_train("x.yaml --print-config --optim.lr 5e-4") == 0
    assert yaml.safe_load(text := capsys.readouterr().out)["optim"]["beta2"] == 0.95
    (here / "printed.yaml").write_text(text)
    assert Config.load("printed.yaml") == Config.load("x.yaml", {"optim.lr": "5e-4"})


def test_help_fills_its_lines(capsys, monkeypatch):
    """Whatever lines an option has in its command's docstring."""
    monkeypatch.setenv("COLUMNS", "200")
    assert run_tool("sample --help") == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: ")
    assert "the fewest that together have probability p; 1 among all." in text


@pytest.mark.parametrize("line", ["", "--help", "-h"])
def test_help_lists_each_command_with_its_summary(capsys, line):
    assert run_tool(line) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        "│ perplexity Print a model's loss" in text
        and "│ train Train a model from a recipe or a YAML file" in text
    )


@pytest.mark.parametrize(
    ("run_command", "line"), [(run_tool, "train --version"), (run_train, "--version")]
)
def test_version_has_the_packages_below(capsys, run_command, line):
    assert run_command(line) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"gpt2_triton {__version__}" and {"torch", "triton", "python"} <= {
        x.split()[0] for x in lines
    }


def test_plan_needs_no_gpu_and_does_not_select_the_interpreter(here, monkeypatch, capsys):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    seen = []
    report = plan.Report(True, ["the plan"], [], [], [])
    monkeypatch.setattr(
        plan, "plan_report", lambda *arguments: seen.append(arguments[2].nbytes) or report
    )
    assert run_train("x.yaml --plan --gpu A100-80") == 0
    assert capsys.readouterr().out.startswith("the plan\n")
    assert seen == [device.memory_bytes("a100-80")] and 79 * 2**30 < seen[0] < 80 * 2**30
    assert "TRITON_INTERPRET" not in os.environ


def test_plan_that_does_not_fit_says_so_first_and_ends_with_the_code_of_its_run(here, capsys):
    plan_of = "x.yaml --plan --gpu 'RTX 4090'"
    too_large = run_train(f"{plan_of} --train.batch_size 65536")
    assert too_large == errors.OutOfMemoryError.exit_code
    assert capsys.readouterr().out.startswith("does not fit the GPU 4090 of 23.50 GiB; set ")
    assert run_train(plan_of) == 0
    assert capsys.readouterr().out.startswith("fits the GPU 4090 of 23.50 GiB\nmemory ")


@pytest.mark.parametrize(
    "names",
    [
        "24GiB|24GB|24 gb|24.0G",
        "4090|rtx4090|RTX_4090|rtx-4090|RTX 4090|NVIDIA RTX 4090",
        "a100-80|A100-80GB|a100_80gb|A100 80G|A100-SXM4-80GB",
        "7900xtx|RX7900XTX|7900 XTX",
    ],
)
def test_a_gpu_or_its_memory_may_be_named_as_people_do(names):
    assert len({device.gpu_of(device.find_gpu(name)) for name in names.split("|")}) == 1


def test_plan_of_fp8_names_a_gpu_without_it(here, capsys):
    plan_on = "x.yaml --plan --train.precision fp8 --train.dtype bf16 --gpu"
    assert run_train(f"{plan_on} MI300X") == 2
    assert (
        "fp8 needs a GPU that multiplies e4m3" in (line := capsys.readouterr().err)
        and "mi300x is gfx942" in line
    )
    assert run_train(f"{plan_on} 4090") == 0


PLAN_OF_AUTO = "x.yaml --plan --buffers --train.precision auto --train.dtype bf16"


def test_plan_says_what_the_precision_auto_is(here, capsys):
    for gpu, chosen in (("--gpu h100", "fp8"), ("", "fp8"), ("--gpu 4090", "bf16")):
        assert run_train(f"{PLAN_OF_AUTO} {gpu}") == 0
        assert f"\ntrain.precision auto: {chosen} (" in (text := capsys.readouterr().out)
        assert ("amax" in text) == (chosen == "fp8")


def test_plan_of_a_resume_keeps_the_runs_precision(here, capsys):
    for had, gpu in (("fp8", "4090"), ("bf16", "h100"), ("", "h100")):
        step = here / f"run_{had}" / "checkpoints" / "step_00000007"
        if had:
            step.mkdir(parents=True)
            (step / "state.json").write_text(json.dumps({"config": {"train": {"precision": had}}}))
        assert run_train(f"{PLAN_OF_AUTO} --gpu {gpu} --run_dir run_{had} --resume") == 0
        text = capsys.readouterr().out
        note = f"train.precision auto: {had} (of the run so far)\n"
        assert text.startswith(note) == bool(had), had
        assert ("amax" in text) == (had != "bf16"), had


def test_plan_takes_a_memory_for_any_other_gpu(here, capsys):
    for precision in ("auto", "fp8"):
        words = f"x.yaml --plan --gpu 24gib --train.precision {precision} --train.dtype bf16"
        assert run_train(words) == 0
        first, *rest = capsys.readouterr().out.splitlines()
        assert first == "fits the GPU 24gib of 24.00 GiB"
        assert any(line.startswith("train.precision auto: bf16") for line in rest) == (
            precision == "auto"
        )


def test_plan_refuses_fewer_rows_than_the_tokenizer_has_tokens(here, capsys):
    byte_level(here / "tok")
    plan_with = "x.yaml --plan --model.vocab_size 300 --data.tokenizer"
    assert run_train(f"{plan_with} tok") == 2
    assert capsys.readouterr() == (
        "",
        "error: model.vocab_size: the tokenizer ./tok has 345 tokens, got 300; "
        "set model.vocab_size to 345\n",
    )
    assert run_train(f"{plan_with} of/another/machine") == 0
    assert capsys.readouterr().out.startswith("fits ")


def test_plan_refuses_a_wrong_key_before_torch_is_imported():
    words = ["quickstart", "--optim.warmup", "400", "--plan"]
    code = (
        "import sys; from gpt2_triton.commands.app import main; "
        "from gpt2_triton.commands.train import app; "
        f"print(main(app, {words}), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n" and "lower it" in done.stderr


@pytest.fixture
def machine(monkeypatch):
    """Make this machine one with or without a GPU, and with these versions."""

    def made(gpu=False, triton="3.10.0"):
        monkeypatch.setattr(device, "present", lambda: gpu)
        monkeypatch.setattr(device, "installed", dict(triton=triton).__getitem__)
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)

    return made


def test_select_device_selects_the_interpreter_without_a_gpu(machine, monkeypatch, capsys):
    machine(gpu=True)
    app.select_device()
    assert "TRITON_INTERPRET" not in os.environ and capsys.readouterr().out == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # as scripts of SLURM do: it would change bits
    machine()
    app.select_device()
    assert os.environ["TRITON_INTERPRET"] == os.environ["OMP_NUM_THREADS"] == "1"
    assert "Triton's interpreter on the CPU" in capsys.readouterr().out


@pytest.mark.parametrize("gpu", [True, False])
def test_select_device_refuses_what_cannot_run(machine, gpu):
    machine(gpu, triton=None)
    with pytest.raises(app.ConfigError, match="^triton: .*; pip install triton, "):
        app.select_device()
    assert "TRITON_INTERPRET" not in os.environ


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sample", "CHECKPOINT"),
        ("sample a --tokens 0 --num 1", "--tokens: must be at least 1, got 0"),
        (
            "sample a --num 1.5",
            "for --num: 1.5 is no whole number such as 1000, 1e9 or 10B; see --help",
        ),
        (
            "sample a --tokens 1e3 --top_p 0",
            "--top_p: must be above 0 and at most 1, got 0.0; 1",
        ),
        ("sample a --temperature nan", "--temperature: must be at least 0, got nan"),
        (
            "sample a --prompt_file /dev/null",
            "/dev/null: no prompt; write one on each line",
        ),
        ("sample a --prompt", "--prompt requires an argument; see --help"),
        ("export a", "--out requires an argument; see --help"),
        (
            "sample a 'Once upon'",
            "Once upon: unexpected; each value needs --prompt, or quotes; see --help",
        ),
        (
            "sample a --num_samples 2",
            "--num_samples: unknown option; for nanoGPT's num_samples use sample",
        ),
        (
            "sample a --max-new-tokens=9",
            "--max_new_tokens: unknown option; for nanoGPT's max_new_tokens use",
        ),
        (
            "sample a --device=cpu",
            "nanoGPT's device has no counterpart here: a run uses the GPU",
        ),
        ("sample a --out_dir b", "--out_dir: unknown option; see --help"),
        ("smaple a", 'Unknown command "smaple"'),
        ("sample a --top-pp 9", "--top_pp: unknown option; did you mean --top_p?\n"),
        ("plot", "RUNS requires an argument"),
        ("plot nowhere", "nowhere: no metrics.jsonl there; expected a run directory"),
        (
            "stats nowhere",
            "nowhere: no stats.jsonl there; name a run trained with --log.stats_every 100",
        ),
        (
            "prepare text a.txt --workers 0",
            'Invalid value "0" for --workers. Must be >= 1',
        ),
        (
            "prepare text a.txt --val_fraction 1",
            '"1.0" for --val_fraction. Must be < 1',
        ),
        ("prepare text", "INPUTS requires an argument; see --help"),
        ("prepare text a --tokenizer gpt5", "--tokenizer"),
    ],
)
def test_tools_report_a_mistake_in_one_line_with_exit_code_2(here, capsys, line, message):
    assert run_tool(line) == 2
    err = capsys.readouterr().err
    assert message in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("gpus, opened", [(2, 1), (0, None)])
def test_a_rank_opens_its_own_gpu_while_torch_is_imported(monkeypatch, gpus, opened):
    """A context on another rank's GPU would take half a gigabyte there."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    retained = []

    def get(number):
        return lambda to, *gpu: setattr(to._obj, "value", number(*gpu))

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=get(lambda: gpus),
        cuDeviceGet=get(lambda number: number),
        cuDevicePrimaryCtxRetain=lambda context, gpu: retained.append(gpu.value),
    )
    monkeypatch.setattr(app.ctypes, "CDLL", lambda name: driver)
    app._open_gpu()
    assert retained == ([] if opened is None else [opened])


def test_missing_temporary_directory_is_one_line(monkeypatch, capsys):
    """As in a container with a read-only file system; torch needs one when it is imported."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/nowhere"])
    assert run(tempfile.gettempdir) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: TMPDIR: ") and len(err.splitlines()) == 1


def test_a_key_that_is_true_or_false_needs_no_true():
    words = ["--data.allow_changed", "--model.tied", "false", "--log.wandb=offline"]
    assert parse_overrides(words) == {
        "data.allow_changed": "true",
        "model.tied": "false",
        "log.wandb": "offline",
    }
    with pytest.raises(ConfigError, match="--train.steps: expected a value after it"):
        parse_overrides(["--train.steps", "--data.allow_changed"])


INTERRUPTED = """
import runpy, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "numpy.linalg":
            sys.meta_path.remove(self)
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["perplexity", "nowhere"]
runpy.run_module("gpt2_triton", run_name="__main__")
"""


@pytest.mark.slow
def test_ctrl_c_while_numpy_is_imported_ends_the_command(tmp_path):
    """torch's C code, which imports numpy too, would go on without it."""
    words = [sys.executable, "-c", INTERRUPTED]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "error: interrupted\n")
