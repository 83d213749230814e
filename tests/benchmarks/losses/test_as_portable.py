"""benchmarks/losses/as_portable.py: the runs and the resume, here in the
interpreter, and the verdict.
"""

import json

import pytest

from benchmarks import as_gpu
from benchmarks.losses import as_portable

SMALL = """--model.n_layer 1 --model.n_head 1 --model.n_embd 64 --model.block_size 16 \
--model.vocab_size 256
    --data.tokenizer bytes --train.seq_len 16 --train.batch_size 2 --train.total_batch_tokens 32 \
--train.steps 4
    --optim.warmup 3 --optim.lr 1e-3 --checkpoint.every 2""".split()


@pytest.mark.slow
def test_a_resumed_run_has_the_bytes_of_the_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(as_gpu, "program", lambda code: ())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    out = tmp_path / "curves.json"
    assert as_portable.main(["a100", "--data", "builtin", "--out", str(out), *SMALL]) == 0
    found = json.loads(out.read_text())
    assert (
        found["code"] == "sm_80 code"
        and found["bytes"] == []
        and found["distance"] == found["scatter"] == 0
    )
    assert [len(curve) for curve in found["curves"].values()] == [4, 4, 4]
    assert "after the resume: equal bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("off", "lines", "code", "verdict"),
    [
        (0.019, [], 0, "agreed"),
        (0.021, [], 1, "DISAGREED"),
        (0.0, ["rank_00000.safetensors: params: sha256 1 != 2"], 1, "DIFFERENT bytes"),
    ],
)
def test_code_is_compared_with_the_scatter(capsys, off, lines, code, verdict):
    portable = [4.0] * 150
    curves = dict(code=[9.0] * 50 + [4.0 - off] * 100, portable=portable, hopper=[4.01] * 150)
    found = dict(code="sm_80 code", curves=curves, bytes=lines)
    found["distance"] = as_portable.distance(curves["code"], portable)
    found["scatter"] = as_portable.distance(portable, curves["hopper"])
    assert as_portable.report(found) == code
    assert verdict in capsys.readouterr().out
