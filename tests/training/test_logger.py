"""The logger: its console lines and files, also of a resumed run."""

import json
import math
import re
from pathlib import Path

import pytest

from gpt2_triton import device
from gpt2_triton.config.config import Config
from gpt2_triton.console import duration
from gpt2_triton.model.step import StepResult
from gpt2_triton.training.logger import Logger
from gpt2_triton.training.lr_schedule import learning_rate
from gpt2_triton.training.metrics import METRICS, STATS, read_metrics
from tests.support.checkpoints import record_syncs
from tests.support.json_files import read_json
from tests.support.loop import records

GUIDE = Path(__file__).parents[2] / "docs" / "guide"


def config(**log):
    train = dict(steps=1000, batch_size=4, total_batch_tokens=8192)
    return Config.model_validate(dict(train=train, optim=dict(warmup=10), log=log))


def result(loss, norm, seconds, applied=True, z=(0.0, 0.0)):
    return StepResult(loss, norm, applied, seconds, z)


def run(directory, steps, resume_step=0, **log):
    """Log a run whose losses are functions of the step, with validation
    every 3 steps; return its id.
    """
    logger = Logger(directory, config(**log), resume_step, about={"git": {"commit": "abc"}})
    for step in steps:
        logger.step(step, result(loss=10 / step, norm=1.0, seconds=0.1))
        if step % 3 == 0:
            logger.validation(step, 9 / step, None, {})
    logger.close()
    return read_json(directory / "run.json")["wandb_id"]


def test_logger_prints_one_line_per_step(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device, "peak_flops", lambda: 1e15)
    logger = Logger(tmp_path, config())
    logger.step(10, result(loss=4.56789, norm=2.0, seconds=60.0))
    logger.step(11, result(loss=4.56789, norm=2.0, seconds=1.0))
    logger.step(12, result(loss=4.12344, norm=1.23446, seconds=0.1123))
    mfu = 8192 / 0.1123 * config().flops_per_token / 1e15
    # 988 steps of 0.9 * 1 s + 0.1 * 0.1123 s: the first step compiles and does not count
    eta = "15m 00s"
    assert capsys.readouterr().out.splitlines()[2] == (
        "step   12/1000 | loss 4.1234 | lr 6.00e-04 | norm 1.2345 | 112.3 ms | 72,947 tok/s "
        f"| mfu {mfu:.1%} | eta {eta}"
    )


def test_logger_syncs_its_files(tmp_path, monkeypatch):
    synced = record_syncs(monkeypatch)
    logger = Logger(tmp_path, config())
    synced.clear()
    logger.sync()
    assert str(tmp_path / METRICS) in synced
    logger.close()
    logger.sync()  # nothing is open: no error


def test_logger_writes_full_records(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "peak_flops", lambda: 1e15)
    logger = Logger(tmp_path, config(), gpus=2)
    logger.step(5, result(loss=4.5, norm=1.25, seconds=0.5))
    logger.validation(5, 4.75, None, {})
    logger.sample(5, "Once\nmore")
    # before close: each line is written at once
    assert read_metrics(tmp_path / METRICS) == [
        {
            "step": 5, "loss": 4.5, "lr": learning_rate(4, config().optim, 1000), "norm": 1.25,
            "ms": 500.0, "tok_s": 16384.0,
            "mfu": pytest.approx(16384 * (6 * 124_475_904 + 6 * 12 * 768 * 1024) / 2e15),
            "tokens": 5 * 8192,
        },
        {"step": 5, "val_loss": 4.75},
        {"step": 5, "sample": "Once\nmore"},
    ]  # fmt: skip


def test_logger_writes_no_mfu_for_an_unknown_gpu(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device, "peak_flops", lambda: None)
    run(tmp_path, [1])
    assert "mfu" not in capsys.readouterr().out
    assert read_metrics(tmp_path / METRICS)[0]["mfu"] is None


def test_peak_flops_are_those_of_the_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    others = dict.fromkeys(("Tesla T4", "NVIDIA GH200 480GB", "NVIDIA GeForce RTX 4090 Laptop GPU"))
    for name, tflops in {"NVIDIA H200": 989.4, "NVIDIA H100 PCIe": 756, **others}.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda name=name: name)
        assert device.peak_flops() == (tflops and tflops * 1e12)


def test_logging_md_lists_every_metric_of_every_kind_of_record(tmp_path):
    logger = Logger(tmp_path, config())
    kinds = {
        "step": (result(4.5, 1.25, 0.5, applied=False, z=(7.0, 0.0)),),
        "validation": (4.75, 4.76, {"NAME": 4.77}),
        "hellaswag": (0.3, 0.31),
        "sample": ("Once",),
        "rewind": (3, 99),
    }
    silent = {"info", "statistics", "close", "sync"}  # they write nothing into metrics.jsonl
    assert {name for name in vars(Logger) if not name.startswith("_")} == kinds.keys() | silent
    logged = {"step"}
    for kind, values in kinds.items():
        getattr(logger, kind)(7, *values)
        logged |= read_metrics(tmp_path / METRICS)[-1].keys()
    page = (
        (GUIDE / "logging.md")
        .read_text(encoding="utf-8")
        .partition("## Metrics")[2]
        .partition("##")[0]
    )
    first_cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    units = [line.split("|")[2].strip() for line in page.splitlines() if line.startswith("| `")]
    assert {key for cell in first_cells for key in re.findall(r"`(\w+)`", cell)} == logged
    assert units.count("") == 2  # of the learning rate and of the norm


def test_logger_names_the_cause_of_a_skipped_step(tmp_path, capsys):
    logger = Logger(tmp_path, config(every=100))
    logger.step(7, result(loss=9.0, norm=1.0, seconds=0.1, applied=False, z=(7.25, -0.5)))
    logger.step(
        8,
        result(math.nan, norm=math.inf, seconds=0.1, applied=False),
        "fch of layer 3 (2 elements)",
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(" | skipped: outlier, loss z 7.2, norm z -0.5")
    assert lines[1].endswith(" | skipped: not finite, first: fch of layer 3 (2 elements)")
    outlier, broken = read_metrics(tmp_path / METRICS)
    assert (outlier["skipped"], outlier["outlier"], outlier["loss_z"], outlier["norm_z"]) == (
        True,
        True,
        7.25,
        -0.5,
    )
    assert (broken["loss"], broken["norm"], broken["skipped"]) == (
        None,
        None,
        True,
    ) and "outlier" not in broken
    assert "NaN" not in (tmp_path / METRICS).read_text()


def test_logger_with_log_every_keeps_each_kth_step_and_the_last(tmp_path):
    run(tmp_path, [*range(1, 26), 999, 1000], every=10)
    steps = [record["step"] for record in read_metrics(tmp_path / METRICS) if "loss" in record]
    assert steps == [10, 20, 1000]


@pytest.mark.parametrize("torn", ["", '{"step": 9, "lo', '{"step": 9, "loss": 1.5}'])
def test_logger_of_a_resumed_run_has_the_lines_of_an_unbroken_one(tmp_path, torn):
    """Stopped at step 8, or while writing step 9; the checkpoint is of step 6."""
    run(tmp_path / "whole", range(1, 13))
    run(tmp_path / "parts", range(1, 9))
    with open(tmp_path / "parts" / METRICS, "a") as file:
        file.write(torn)
    run(tmp_path / "parts", range(7, 13), resume_step=6)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    assert not list((tmp_path / "parts").glob(".*"))


def test_second_resume_from_a_checkpoint_repeats_no_record(tmp_path):
    run(tmp_path, range(1, 7))
    before = records(tmp_path)
    logger = Logger(tmp_path, config(), 6)
    logger.validation(6, 9 / 6, None, {})
    logger.close()
    assert records(tmp_path) == before


def test_texts_are_written_in_unicode_also_after_a_resume(tmp_path):
    text = 'Ελλάδα \u2028 "\x85" \ud83d 🙂\r\n'  # line ends of Unicode, and half a character
    Logger(tmp_path, config()).sample(1, text)
    for resume_step in (0, 1):
        if resume_step:
            Logger(tmp_path, config(), resume_step).close()
        assert 'Ελλάδα \u2028 \\"\x85\\"' in (tmp_path / METRICS).read_bytes().decode()
        assert [record["sample"] for record in read_metrics(tmp_path / METRICS)] == [text]


def test_read_metrics_leaves_out_damaged_lines_with_a_warning(tmp_path, capsys):
    run(tmp_path, range(1, 9))
    lines = (tmp_path / METRICS).read_text().splitlines()
    lines[1], lines[4] = lines[1][:20] + lines[1], '"text"'
    (tmp_path / METRICS).write_text("\n".join(lines) + "\n")
    capsys.readouterr()
    assert [record["step"] for record in read_metrics(tmp_path / METRICS)] == [
        1,
        3,
        3,
        5,
        6,
        6,
        7,
        8,
    ]
    warning = (
        f"warning: {tmp_path / METRICS}: damaged lines left out: 2 of 10, the first is line 2\n"
    )
    assert capsys.readouterr().err == warning


def test_statistics_lose_undone_steps_also_if_they_are_turned_off(tmp_path):
    first = Logger(tmp_path, config(stats_every=1))
    for step in (1, 2, 3):
        first.step(step, result(2.0, 1.0, 0.1))
        first._stats.write(json.dumps({"step": step}) + "\n")
    first.close()
    Logger(tmp_path, config(), 2).close()
    assert [record["step"] for record in read_metrics(tmp_path / STATS)] == [1, 2]


def test_run_json_has_an_entry_for_each_start(tmp_path):
    for resume_step, about in ((0, {"git": "a"}), (6, {"git": "b"})):
        Logger(tmp_path, config(), resume_step, about=about).close()
    assert (tmp_path / "config.yaml").read_text() == config().to_yaml()
    place = [str(tmp_path), tmp_path.stat().st_ino]
    expected = {"wandb_id": None, "place": place, "starts": [{"git": "a"}, {"git": "b"}]}
    assert read_json(tmp_path / "run.json") == expected
    Logger(tmp_path, config(), 0, about={"git": "c"}).close()
    assert read_json(tmp_path / "run.json")["starts"] == [{"git": "c"}]


@pytest.mark.parametrize("text", ["[", "[5]", "{}"])
def test_damaged_run_json_counts_as_empty(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    Logger(tmp_path, config(), 6, about={"git": "b"}).close()
    assert read_json(tmp_path / "run.json")["starts"] == [{"git": "b"}]


def test_duration_formats():
    assert [duration(s) for s in (0.4, 12, 245, 4980, 360_000)] == [
        "0s",
        "12s",
        "4m 05s",
        "1h 23m",
        "100h 00m",
    ]
