"""`train own --data`: shards and keys of a user's own text, in one command."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from gpt2_triton import device
from gpt2_triton.checkpoint import huggingface
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.save import Retention, save_checkpoint
from gpt2_triton.checkpoint.sources import READERS
from gpt2_triton.commands import app as commands_app
from gpt2_triton.commands import own
from gpt2_triton.data.shards import open_shards
from gpt2_triton.errors import DataError
from gpt2_triton.training import trainer
from tests.support.checkpoints import STEP_10, STEP_20, example, state, write
from tests.support.commands import run_train
from tests.support.foreign import weights_of
from tests.support.tiny import tiny_model
from tests.support.tokenizer_files import byte_level

ROOT = Path(__file__).parents[2]
TEXT = "To be, or not to be, that is the question.\n" * 250


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with my.txt, 10,750 characters, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(device, "present", lambda: False)
    (tmp_path / "my.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def trained(monkeypatch):
    """The configuration of each call of trainer.train, which writes it as a run does."""
    configs = []

    def train(config, run_dir, *_):
        configs.append(config)
        (run_dir / "config.yaml").write_text(config.to_yaml())
        (run_dir / "metrics.jsonl").touch()
        return 0

    monkeypatch.setattr(trainer, "train", train)
    return configs


def export_weights(directory, kind="hf", **sizes):
    """Export a tiny model of these sizes."""
    model, _ = tiny_model(model=sizes)
    export(weights_of(model), directory, kind, "fp32")


def become_rank(rank, monkeypatch):
    """Make this process one of two ranks."""
    launcher = dict(WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29500")
    for name, value in (launcher | dict(RANK=rank, LOCAL_RANK=rank)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # rank 1 drops its own


def files(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("own", "own: needs --data and one or more text files"),
        ("own --data", "own: needs --data and one"),
        (
            "quickstart --data my.txt",
            "recipe own, as `python -m gpt2_triton train own --data my.txt`; for",
        ),
        (
            "quickstart --field x",
            "--field, --no-special, --strict: go with --data and the recipe own",
        ),
        (
            "own --data my.txt --train.steps x",
            "error: train.steps: must be a valid integer",
        ),
        ("own --data my.txt --model.n_embd 100", "error: model.n_embd: "),
        (
            "own --data my.txt --data.tokenizer gpt5",
            "error: data.tokenizer: must be gpt2, llama3, bytes, or an existing tokenizer.json",
        ),
    ],
)
def test_mistakes_are_one_line_with_exit_code_2(here, capsys, line, message):
    assert run_train(line) == 2
    assert message in (err := capsys.readouterr().err) and len(err.splitlines()) == 1


def test_text_that_cannot_be_used_has_exit_code_3_and_leaves_nothing(here, capsys):
    (here / "short.txt").write_text("short")
    before = files(here)
    for file, message in (("short.txt", "too little text"), ("no.txt", "no.txt: no such file")):
        assert run_train(f"own --data {file}") == 3
        assert message in capsys.readouterr().err and files(here) == before


def test_vocabulary_smaller_than_the_tokenizers_is_refused_before_the_text_is_prepared(
    here, capsys
):
    byte_level(here / "tok")
    before = files(here)
    line = "own --data my.txt --data.tokenizer tok --model.vocab_size 300"
    for more in ("", " --plan"):
        assert run_train(line + more) == 2
        assert "has 345 tokens, got 300; set" in capsys.readouterr().err and files(here) == before


def test_run_dir_that_cannot_be_written_is_refused_before_the_text_is_read(
    here, monkeypatch, capsys
):
    (here / "runs").mkdir()
    # root may write everywhere
    monkeypatch.setattr(os, "access", lambda path, mode: path != here / "runs")
    assert run_train("own --data my.txt --run_dir runs/a/b") == 2
    message = (
        f"error: --run_dir: cannot write to {here / 'runs'}; "
        "choose another, or correct its permissions\n"
    )
    assert capsys.readouterr().err == message and files(here) == ["my.txt", "runs"]


def test_text_that_cannot_be_used_is_an_error_of_every_rank(here, trained, monkeypatch, capsys):
    (here / "short.txt").write_text("short")
    monkeypatch.setattr(commands_app.os, "_exit", lambda code: None)
    monkeypatch.setattr(commands_app.time, "sleep", lambda seconds: None)
    for rank, said in (("1", ""), ("0", "error: --data: 5 tokens are too little text")):
        become_rank(rank, monkeypatch)
        assert run_train("own --data short.txt") == 3
        err = capsys.readouterr().err
        assert err.startswith(said) and bool(err) == bool(said)


def test_first_start_prepares_the_text_and_prints_what_it_picked(here, trained, capsys):
    assert run_train("own --data my.txt --train.steps 7 --data.val mine.bin") == 0
    out = capsys.readouterr().out
    assert "10,750 characters, on the CPU; tokenizer bytes" in out and "steps: 7 of " in out
    assert "\n  expected time of all steps without a GPU: 1m 00s, " in out
    assert "\nparameters " not in out  # the log says them
    [config] = trained
    shards = Path(config.data.train).parent
    assert config.data.val == "mine.bin"
    assert (
        shards.parts[0] == "data"
        and shards.name.startswith("my_bytes_")
        and (shards / "train_000000.bin").is_file()
    )
    assert sorted(path.name for path in (here / "data").iterdir()) == [shards.name]
    assert [path.name.partition("-")[0] for path in (here / "runs").iterdir()] == ["own"]


def test_plan_and_print_config_say_what_was_picked_and_write_nothing(here, trained, capsys):
    before = files(here)
    assert run_train("own --data my.txt --plan --gpu 4090") == 0
    out = capsys.readouterr().out
    assert out.startswith("own text: 10,750 characters, on a GPU; tokenizer bytes, 10,750")
    assert "\nfits the GPU 4090 of 23.50 GiB\nmemory " in out
    assert run_train("own --data my.txt --plan") == 0
    assert (out := capsys.readouterr().out).startswith("own text: 10,750 characters, on the CPU; ")
    assert "\nfits this machine of " in out and "largest train.batch_size" not in out
    assert run_train("own --data my.txt --print_config") == 0
    printed = yaml.safe_load(own_yaml := capsys.readouterr().out)
    assert printed["data"]["tokenizer"] == "bytes" and printed["model"]["vocab_size"] == 256
    assert not trained and files(here) == before
    with pytest.raises(
        DataError, match="`.* prepare text YOUR_TEXT --tokenizer bytes --out data/my_bytes_.{8}`"
    ):
        open_shards(printed["data"]["train"], 256, 64)
    (here / "own.yaml").write_text(own_yaml)  # a file, no recipe
    assert (
        run_train("own.yaml --data my.txt --plan") == 2
        and "for own.yaml give" in capsys.readouterr().err
    )
    assert run_train("./own.yaml") == 0 and trained == [own.Config.load("own.yaml")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        dict(),
        dict(arch="llama", norm_eps=1e-6, head_dim=128, qk_norm=True),
    ],
    ids=["gpt2", "qwen3"],
)
def test_weights_of_a_directory_are_finetuned_and_exported(here, capsys, more):
    export_weights(here / "theirs", n_layer=1, block_size=32, **more)
    small = "--train.steps 2 --train.total_batch_tokens 64 --train.batch_size 1 --eval.tokens 64"
    start = f"own --data my.txt {small} --sample.tokens 2 --init_from"
    assert run_train(f"{start} hf:theirs --run_dir run") == 0
    out = capsys.readouterr().out
    assert (
        "tokenizer bytes, 10,750 tokens\n" in out
        and "\nfits this machine of " in out
        and "--- sample after step 2 ---" in out
    )
    assert out.endswith("wrote run/exported_step_00000002, for transformers\n")
    tuned, before = (
        huggingface.read(str(path))
        for path in (here / "run" / "exported_step_00000002", here / "theirs")
    )
    assert tuned.model == before.model
    norm = [name for name in tuned.shapes if "norm" in name or "ln" in name][0]
    assert 0 < np.abs(tuned.read(norm) - before.read(norm)).max() < 1e-3
    assert run_train(f"{start} checkpoint:run/best --run_dir again") == 0
    first, again = (
        yaml.safe_load((here / name / "config.yaml").read_text()) for name in ("run", "again")
    )
    assert again["model"] == first["model"] and again["optim"] == first["optim"]


def test_weights_of_another_tokenizer_name_theirs(here, trained, capsys):
    byte_level(here / "tok")
    export_weights(here / "theirs")
    assert run_train("own --data my.txt --init_from hf:theirs --data.tokenizer tok") == 4
    assert capsys.readouterr().err.endswith("; set data.tokenizer to bytes\n")


def test_weights_without_files_are_finetuned_with_the_tokenizer_that_is_given(
    here, trained, capsys
):
    byte_level(here / "tok")
    export_weights(here / "theirs", "llmc", vocab_size=345, block_size=32)
    line = "own --data my.txt --init_from llmc:theirs"
    assert run_train(line) == 4
    said = "name its tokenizer as data.tokenizer of a run; "
    assert said in capsys.readouterr().err and not (here / "data").exists()
    for tokenizer, code in (("bytes", 0), ("tok", 0), ("gpt2", 2)):
        assert run_train(f"{line} --data.tokenizer {tokenizer}") == code, tokenizer
    assert [config.model.vocab_size for config in trained] == [345, 345]
    assert [config.data.tokenizer for config in trained] == ["bytes", "./tok"]


def test_one_rank_exports_a_run_that_was_not_stopped(here, trained, monkeypatch):
    exported = []
    monkeypatch.setattr(own, "export", lambda *_: exported.append(os.environ["RANK"]))
    monkeypatch.setattr(own, "_weights", lambda *_, **words: None)
    for rank, code in (("0", 0), ("1", 0), ("0", 143)):
        monkeypatch.setattr(trainer, "train", lambda *_, code=code: code)
        become_rank(rank, monkeypatch)
        start = "own --data my.txt --run_dir run --init_from hf:gpt2 --data.tokenizer bytes"
        assert run_train(start) == code
    assert exported == ["0"]


def test_the_best_checkpoint_is_exported_else_the_newest(here, monkeypatch):
    directory, exported = here / "run" / "checkpoints", []
    monkeypatch.setattr(
        "gpt2_triton.checkpoint.export.export", lambda source, *_: exported.append(source)
    )
    write(directory, 10)
    for best in ([10, 1.0], None):
        save_checkpoint(directory, 20, example(20), state(20, best=best), Retention(0))
        own.export(here / "run", own.Config())
    assert exported == [str(directory / name) for name in (STEP_10, STEP_20)]


@pytest.mark.parametrize(
    ("vocab_size", "words", "said"),
    [
        (
            300,
            "",
            "hf:theirs: its 300 tokens have no known tokenizer; put its tokenizer.json into theirs",
        ),
        (
            256,
            "--model.n_layer 3",
            "hf:theirs has n_layer 2, this run n_layer 3; set model.n_layer to 2",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_before_the_text_is_prepared(
    here, trained, capsys, vocab_size, words, said
):
    export_weights(here / "theirs", vocab_size=vocab_size)
    if vocab_size == 300:
        for name in ("tokenizer.json", "vocab.json"):
            (here / "theirs" / name).unlink()
    assert run_train(f"own --data my.txt --init_from hf:theirs {words}") == 4
    assert said in capsys.readouterr().err and not (here / "data").exists()


def test_openais_weights_are_downloaded_before_the_text_is_prepared(here, trained, monkeypatch):
    """But not for a plan, which knows their sizes."""
    asked = []
    monkeypatch.setitem(
        READERS, "hf", lambda name: asked.append((name, (here / "data").exists())) or sys.exit(7)
    )
    line = "own --data my.txt --init_from hf:gpt2 --data.tokenizer bytes"
    assert run_train(f"{line} --print_config") == 0 and asked == []
    with pytest.raises(SystemExit):
        run_train(line)
    assert asked == [("gpt2", False)]


def test_second_start_uses_the_same_shards_and_changed_or_renamed_text_new_ones(
    here, trained, capsys
):
    for name in ("my.txt", "my.txt", "my.md"):
        next(here.glob("my.*")).rename(here / name)
        assert run_train(f"own --data {name}") == 0
    assert "is prepared already" in capsys.readouterr().out
    (here / "my.md").write_text(TEXT + "That is the end.\n")
    assert run_train("own --data my.md") == 0
    first, second, *others = (config.data.train for config in trained)
    assert first == second and len({first, *others}) == len(list((here / "data").iterdir())) == 3


def test_folders_globs_and_several_files(here, trained):
    (here / "folder").mkdir()
    (here / "folder" / "a.txt").write_text(TEXT)
    (here / "[b].jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    assert run_train("own --data folder [b].jsonl my.* --optim.lr 1e-3") == 0
    [config] = trained
    assert (
        Path(config.data.train).parent.name.startswith("folder_bytes_") and config.optim.lr == 1e-3
    )
    record = json.loads((Path(config.data.train).parent / "shards.json").read_text())
    assert [row["file"] for row in record["source"]] == ["a.txt", "[b].jsonl", "my.txt"]


def test_resume_takes_the_keys_of_the_run(here, trained, monkeypatch):
    """Also on another machine, and where the rules of a later version would pick other keys."""
    line = "own --data my.txt --run_dir run"
    assert run_train(f"{line} --optim.lr 5e-4 --data.allow_changed true") == 0
    monkeypatch.setattr(own.own_text, "choose", lambda *arguments: {})
    assert run_train(f"{line} --resume --eval.every 3") == 0
    # which is for one start
    assert trained[1] == trained[0].replace(eval={"every": 3}, data={"allow_changed": False})
    assert trained[1].optim.lr == 5e-4


def test_resume_must_is_refused_before_the_text_is_prepared(here, capsys):
    assert run_train("own --data my.txt --run_dir run --resume must") == 4
    err = capsys.readouterr().err
    assert err.startswith("error: --resume must: run has no checkpoint; ")
    assert files(here) == ["my.txt"]


def test_resume_needs_no_text_while_the_shards_are_there(here, trained, monkeypatch, capsys):
    line = "own --run_dir run --resume"
    assert run_train(line) == 2 and "own: needs --data" in capsys.readouterr().err
    first = "own --data my.txt --run_dir run --init_from hf:theirs"
    export_weights(here / "theirs", block_size=32)
    exported = []
    monkeypatch.setattr(own, "export", lambda run_dir, _: exported.append(run_dir))
    assert run_train(f"{first} --data.allow_changed true") == 0
    (here / "my.txt").unlink()
    assert run_train(f"{line} --eval.every 3") == 0
    assert trained[1] == trained[0].replace(eval={"every": 3}, data={"allow_changed": False})
    assert exported == [Path("run"), Path("run")]
    shards = Path(trained[0].data.train).parent
    assert f"own text: {shards}/train_*.bin, as before: " in capsys.readouterr().out
    for without in ("own --run_dir run", f"{line} --data"):
        assert run_train(without) == 2 and "own: needs --data" in capsys.readouterr().err
    assert run_train(f"{line} --print_config") == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["train"] == trained[0].data.train
    assert run_train(f"{line} --plan") == 0 and "fits this" in capsys.readouterr().out
    shards.rename(here / "moved")
    assert run_train(line) == 3 and len(trained) == 2
    err = capsys.readouterr().err
    assert err.startswith(
        f"error: {shards}/train_*.bin: no such shards, which run was trained on; "
    )
    assert err.endswith("give its text again, as --data my.txt\n") and len(err.splitlines()) == 1
    with pytest.raises(DataError) as error:
        own.without_text(here / "run", {}, 1)
    assert error.value.on_every_rank  # each host prints it once


def test_resume_without_the_tokenizers_folder_takes_the_runs_copy(here, trained):
    byte_level(here / "tok")
    line = "own --data my.txt --run_dir run"
    given = f"{line} --data.tokenizer ./tok"
    assert run_train(given) == 0
    (here / "tok").rename(here / "run" / "source")
    assert run_train("own --run_dir run --resume") == 0  # the trainer finds the copy
    assert run_train(f"{line} --resume") == 0
    assert run_train(f"{given} --resume") == 0  # the same command
    found = [config.data.tokenizer for config in trained]
    assert found == ["./tok", "./tok", "run/source", "run/source"]


def test_what_is_left_out_is_said_once_or_refused_and_a_field_is_named(here, trained, capsys):
    (here / "folder").mkdir()
    (here / "folder" / "A.MD").write_text(TEXT)
    (here / "folder" / "b.pdf").touch()
    (here / "x.jsonl").write_text(json.dumps({"doc": {"body": TEXT}}))
    left_out = "files of other kinds (.pdf), not given by their ending: 1, first folder/b.pdf"
    for words, code, said in (
        ("folder", 0, f"left out: {left_out}\n"),
        ("folder --plan", 0, f"left out: {left_out}\n"),
        ("folder --strict", 3, f"--strict: would leave out {left_out}; "),
        ("x.jsonl --field doc", 3, "no text, but rows without text in the field doc: 1"),
        ("x.jsonl --field doc.body", 0, "own text: 10,750 characters"),
    ):
        assert run_train(f"own --data {words}") == code
        assert "".join(capsys.readouterr()).count(said) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_own_text_is_prepared_trained_and_sampled(here):
    """The whole command in a new process, with 3 small steps in the place of the picked ones."""

    def run(*words):
        environment = {"PATH": "", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, *words], cwd=here, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    keys = (
        "--train.steps 3 --train.total_batch_tokens 64 --train.seq_len 64 "
        "--eval.tokens 64 --sample.tokens 2"
    )
    out = run(str(ROOT / "train.py"), "own", "--data", "my.txt", "--run_dir", "run", *keys.split())
    assert "steps: 3 of 64 tokens" in out and "step 3/3" in out
    plan = run(str(ROOT / "train.py"), "own", "--data", "my.txt", "--plan", *keys.split())
    # by one table
    assert "\nmemory " in plan and plan.partition("\nmemory ")[2].partition("\n")[0] in out
    assert "To be" in run(
        "-m", "gpt2_triton", "sample", "run", "--prompt", "To be", "--tokens", "2"
    )
