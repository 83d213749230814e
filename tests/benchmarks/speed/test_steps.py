"""`python -m benchmarks steps`: the steps that are timed, the runs as processes, the
table.  The times need a GPU.
"""

import json
import os
import subprocess
import sys
from unittest.mock import MagicMock

import pytest
import torch

from benchmarks.speed import energy, multi_gpu, steps, torch_gpt2, torch_llama
from benchmarks.speed.our_gpt2 import run_steps
from benchmarks.speed.sizes import Work, work_of
from gpt2_triton import device
from gpt2_triton.commands.app import main
from gpt2_triton.config.schema import ModelConfig
from tests.support import ranks
from tests.support.tiny import packed_batch, tiny_config, tiny_model


def test_two_micro_steps_equal_one_step_of_the_same_batch():
    """The loss is a mean: two equal micro-batches have the loss of one, and add
    up halves of its gradient.
    """
    losses = []
    for micro_steps in (1, 2):
        model, config = tiny_model(train=dict(total_batch_tokens=micro_steps * 32))
        results = list(run_steps(model, packed_batch(config), range(2)))
        assert model.shape.accumulation == micro_steps and len(results) == 2
        losses += [[(result.loss, result.norm) for result in results]]
    # other roundings of the same sums
    assert losses[1] == [pytest.approx(step, rel=1e-5) for step in losses[0]]
    assert losses[0][1] < losses[0][0]


@pytest.mark.parametrize("size", ["d12", "d24", "llama:c768", "llama:1b", "qwen3:0.6b"])
def test_torch_model_has_as_many_parameters(size):
    config = work_of(size).config()
    kind = torch_llama.Llama if config.model.arch == "llama" else torch_gpt2.GPT2
    with torch.device("meta"):
        model = kind(config.model)
    assert sum(p.numel() for p in model.parameters()) == config.n_params


def test_torch_s_loss_in_chunks_has_the_same_gradient():
    sizes = dict(n_layer=1, n_head=1, n_embd=64, vocab_size=256, block_size=64)
    model, grads = torch_gpt2.GPT2(ModelConfig(**sizes)), []
    ids, targets = torch.randint(256, (2, 3, 40))
    for model.chunks in (1, 7):
        grads += torch.autograd.grad(model(ids, targets), model.wte.weight)
    torch.testing.assert_close(*grads)


def test_table_computes_rates_and_ratios():
    report = dict(ms=100.0, joules=71.24, gib=17.25, planned=17.0, first_step=3.21)
    row = dict(size="d12", batch=64, program="ours bf16", recompute="gelu", report=report)
    slower = report | dict(ms=110.0, gib=23.0)
    pytorch = row | dict(program="PyTorch", recompute=None, report=slower)
    # 65,536 tokens in 0.1 s; 6N + 6LCT with N = 124,475,904 (the vocabulary padded,
    # wpe in it) and LCT = 9,437,184
    mfu = 655_360 * 6 * (124_475_904 + 9_437_184) / 989e12
    _, ours, torch_line = steps.table([row, pytorch], 989e12).splitlines()
    expected = f"d12 64 ours bf16 gelu 100.0 655,360 {mfu:.1%} 71.2 17.25 17.00 3.2 1.100x 0.75x"
    assert ours.split() == expected.split() and torch_line.split()[-2:] == ["1.000x", "1.00x"]


def test_energy_is_taken_between_changes_of_the_counter():
    """A counter that changes every 100 ms, read at other times: its first and
    last values are incomplete.
    """
    samples = [(t / 1000, 700 * (t // 100) / 10) for t in range(30, 1_050, 7)]
    assert energy.mean_watts(samples) == pytest.approx(700, rel=0.02)  # a sample may come 7 ms late
    assert energy.mean_watts(samples[:20]) is None and energy.mean_watts([]) is None


def test_thousandths_of_nvml_become_joules_and_watts(monkeypatch):
    nvml = MagicMock()
    nvml.nvmlDeviceGetTotalEnergyConsumption.return_value = 71_240
    nvml.nvmlDeviceGetEnforcedPowerLimit.return_value = 700_000
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(energy, "torch", MagicMock())
    power = energy.Power()
    assert (power._joules(), energy.power_limit()) == (71.24, 700.0)
    power.watts = 700.0
    assert power.joules(0.5) == 350.0


RUN = """
import json, sys
if sys.argv[1] == "d24" and "--recompute" not in sys.argv:
    sys.exit("no memory left")
print(json.dumps(dict(ms=100.0, gib=2.0, planned=1.5, first_step=1.0, saw=sys.argv[1:])))
"""


def test_compare_runs_each_program_and_reports_a_failed_one(tmp_path, monkeypatch):
    (tmp_path / "standin.py").write_text(RUN)
    monkeypatch.chdir(tmp_path)  # python -m looks here
    run, out = steps.run_program, tmp_path / "figures.json"
    launchers = []

    def replaced(program, *more):
        launchers.append(program.launcher)
        return run(program._replace(module="standin", launcher=()), *more)

    monkeypatch.setattr(steps, "run_program", replaced)
    monkeypatch.setattr(device, "peak_flops", lambda: None)
    monkeypatch.setattr(device, "name", lambda: "NVIDIA H100")

    def saw():
        rows = json.loads(out.read_text())["rows"]
        reports = {f"{row['size']} {row['program']}": row["report"] for row in rows}
        return {key: report and " ".join(report["saw"][:3] + report["saw"][4:])
                for key, report in reports.items()}  # fmt: skip

    keys = ("--fp8.keep_bf16", "none")
    works = [Work("d12", 8, "none", "fp8", "muon", keys)]
    assert steps.compare(works, 7, "torchao", out) == 0
    options = "--recompute none --precision fp8 --optim muon --fp8.keep_bf16 none"
    assert saw() == {
        "d12 ours fp8 muon": f"d12 8 7 {options}",
        "d12 PyTorch": "d12 8 7",
        "d12 torchao tensorwise": "d12 8 7 --fp8 tensorwise",
        "d12 torchao rowwise": "d12 8 7 --fp8 rowwise",
    }
    assert steps.compare([work_of("d24")], 6, "torch", out, "a100") == 1
    assert [key for key, words in saw().items() if words] == ["d24 ours bf16, sm_80 code"]
    assert launchers[-2:] == [("benchmarks.as_gpu", "a100"), ()]


@pytest.mark.slow
def test_at_the_limit_a_launcher_ends_its_ranks(tmp_path, monkeypatch):
    """It gets SIGTERM, and stays in our process group, for Ctrl-C of a terminal."""
    end = "lambda *_: (print(os.getpgrp(), file=open('ended', 'w')), sys.exit(1))"
    launcher = f"import os, signal, sys\nsignal.signal(15, {end})\nsignal.pause()\n"
    (tmp_path / "launcher.py").write_text(launcher)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        steps.run_program(steps.PYTORCH._replace(launcher=("launcher",)), "d12", 8, 7, limit=2)
    assert (tmp_path / "ended").read_text() == f"{os.getpgrp()}\n"


def test_the_speed_of_joint_steps_is_of_each_gpu_and_beside_the_slowest_and_the_mean():
    ranks = [dict(alone=[ms, ms, 99.0], together=[12.5]) for ms in (10.0, 11.0)]
    _, first, second, found = multi_gpu.speed_table(ranks, 65_536).splitlines()
    assert (first.split(), second.split()) == (["0", "10.00", "12.50"], ["1", "11.00", "12.50"])
    speed = "together 5,242,880 tokens/s on each GPU"
    assert found == f"{speed}: 88.0% of the slowest alone, 83.8% of the mean alone"


def test_a_gpu_alone_has_no_steps_together(monkeypatch, capsys):
    monkeypatch.setattr(device, "present", lambda: True)
    assert main(multi_gpu.app, ["d12"]) == 2
    assert "multi_gpu: needs CUDA GPUs, and two ranks or more" in capsys.readouterr().err


def losses_by_turns(config):
    """Return the losses of each stretch on this rank, and the milliseconds of each kind."""
    stretches, steps = list[list[float]](), multi_gpu.run_steps

    def seen(*words):
        results = [result._replace(seconds=0.25) for result in steps(*words)]
        stretches.append([result.loss for result in results])
        return results

    multi_gpu.run_steps, multi_gpu.packed_batch = seen, packed_batch
    multi_gpu.compile_run = lambda model: None
    group = multi_gpu.Ranks("cpu", 60)
    pair = multi_gpu.Pair(group, config)
    # NaN: a stretch depends on nothing that the other model has left
    pair.together.arena.fill_(255)
    times = multi_gpu.by_turns(pair.kinds, steps=2, rounds=1)
    group.close()
    return stretches, times


@pytest.mark.slow
def test_models_alone_and_together_take_turns_in_one_memory(tmp_path):
    """Both ranks have the same tokens, so a joint step has the loss of a step alone."""
    config = tiny_config(model=dict(n_layer=1))
    for stretches, times in ranks.run(2, tmp_path / "stderr", losses_by_turns, config):
        assert times == dict.fromkeys(("alone", "in step", "together"), [250.0, 250.0])
        *first, together, in_step, alone = stretches  # of one step, then in reverse of three
        assert alone == in_step == pytest.approx(together, rel=1e-6)
        assert first == [alone[:1], in_step[:1], together[:1]]
