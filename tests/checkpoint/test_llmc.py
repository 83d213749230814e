"""llm.c's model and tokenizer files: ours follow its format byte for byte, import
and export keep every bit.
"""

import hashlib

import numpy as np
import pytest
import torch

from gpt2_triton.checkpoint import llmc
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.weights import to_flat_buffers
from gpt2_triton.data.tokenizer import get_tokenizer
from gpt2_triton.errors import CheckpointError
from gpt2_triton.model import architecture
from gpt2_triton.model.gpt2.buffers import Params
from gpt2_triton.model.tables import param_views
from tests.support.foreign import checkpoint_of, config_of, random_params

L, C, V, VP, T = 2, 64, 300, 384, 16
# of llm.c's gpt2_tokenizer.bin
GPT2_SHA256 = "6f3abc21e444e4e8300e225f4e03da48ea121cf17e30f67009b8dad7a66c2f13"


def file_bytes(params: torch.Tensor, config, dtype: torch.dtype, rows: int = VP) -> bytes:
    """A model file written out tensor by tensor, as llm.c's train_gpt2.py
    does and its C programs read.
    """
    p = param_views(Params, params, architecture.dimensions(config.model))
    wte = torch.zeros(rows, C)
    wte[:V] = p.wte[:V]
    tensors = [
        wte, p.wpe, p.lnw[0:-1:2], p.lnb[0:-1:2], *p.qkvw, p.qkvb, *p.attprojw, p.attprojb,
        p.lnw[1::2], p.lnb[1::2], *p.fcw, p.fcb, *p.fcprojw, p.fcprojb, p.lnw[-1], p.lnb[-1],
    ]  # fmt: skip
    header = torch.zeros(256, dtype=torch.int32)
    header[:8] = torch.tensor([20240326, 3 if dtype == torch.float32 else 5, T, V, L, 1, C, rows])
    words = torch.int32 if dtype == torch.float32 else torch.int16
    body = [t.contiguous().to(dtype).view(words).numpy().tobytes() for t in tensors]
    return header.numpy().tobytes() + b"".join(body)


@pytest.fixture
def model(tmp_path):
    """(configuration, parameters, a run that has them)."""
    config = config_of()
    params = random_params(config)
    checkpoint_of(tmp_path / "run", config, {"params": params})
    return config, params, tmp_path / "run"


@pytest.mark.parametrize("rows", [V, 512])  # llm.c pads as we do
def test_llmc_reader_takes_any_padding(model, tmp_path, rows):
    config, params, _ = model
    (tmp_path / "model.bin").write_bytes(file_bytes(params, config, torch.float32, rows))
    read = to_flat_buffers(llmc.read(str(tmp_path / "model.bin")), config)
    assert torch.equal(read["params"], params)


def test_llmc_reader_leaves_padding_out(model, tmp_path):
    config, params, _ = model
    data = np.frombuffer(bytearray(file_bytes(params, config, torch.float32)), np.float32)
    data[256 + V * C : 256 + VP * C] = np.nan
    (tmp_path / "model.bin").write_bytes(data.tobytes())
    assert torch.equal(
        to_flat_buffers(llmc.read(str(tmp_path / "model.bin")), config)["params"], params
    )


def with_header(data: bytes, **words: int) -> bytes:
    """Return `data` with words of its header replaced: w1=3 sets header[1] to 3."""
    words_of = np.frombuffer(bytearray(data), np.int32)
    for index, value in words.items():
        words_of[int(index[1:])] = value
    return words_of.tobytes()


REFUSED = [
    (lambda data: with_header(data, w0=20240520), "not a model file of llm.c"),
    (lambda data: with_header(data, w1=2), "version 2, expected 3 .fp32. or 5 .bf16."),
    (lambda data: data[:-4], "by its header; copy it again"),
]


@pytest.mark.parametrize(("damage", "message"), REFUSED)
def test_llmc_reader_refuses_other_files(model, tmp_path, damage, message):
    config, params, _ = model
    (tmp_path / "model.bin").write_bytes(damage(file_bytes(params, config, torch.float32)))
    with pytest.raises(CheckpointError, match=message) as error:
        llmc.read(str(tmp_path / "model.bin"))
    assert "\n" not in str(error.value)
    with pytest.raises(CheckpointError, match="cannot be read .No such file"):
        llmc.read(str(tmp_path / "none.bin"))


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_llmc_tokenizer_file_has_each_token_as_length_and_bytes(tmp_path, name):
    tokenizer = get_tokenizer(name)
    config = config_of(vocab_size=tokenizer.vocab_size, data=dict(tokenizer=name))
    step_dir = checkpoint_of(tmp_path / "run", config)
    export(str(step_dir), tmp_path / "out", "llmc", "bf16")
    data = (tmp_path / "out" / "gpt2_tokenizer.bin").read_bytes()
    header, at, tokens = np.frombuffer(data[:1024], np.uint32), 1024, []
    while at < len(data):
        tokens.append(data[at + 1 : at + 1 + data[at]])
        at += 1 + data[at]
    assert (
        header[:4].tolist() == [20240328, 2, tokenizer.vocab_size, tokenizer.eot]
        and not header[4:].any()
    )
    assert len(tokens) == tokenizer.vocab_size and all(tokens)
    assert b"".join(tokens[i] for i in tokenizer.encode("hello wörld")).decode() == "hello wörld"
    assert name == "bytes" or hashlib.sha256(data).hexdigest() == GPT2_SHA256
