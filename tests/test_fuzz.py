"""Damaged and made-up files: whatever is in them, only UserError leaves
the functions that read them.

FUZZ_EXAMPLES=4000 python -m pytest tests/test_fuzz.py tries as many in
each test, in about ten minutes.
"""

import copy
import json
import os
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpt2_triton.checkpoint import resume
from gpt2_triton.checkpoint.export import export
from gpt2_triton.checkpoint.format import MANIFEST
from gpt2_triton.checkpoint.load import find_checkpoint, open_checkpoint, verify
from gpt2_triton.checkpoint.sources import load_weights, open_weights
from gpt2_triton.config.config import Config
from gpt2_triton.config.load import read_yaml
from gpt2_triton.data.loader import Windows
from gpt2_triton.data.prepare.build import is_done
from gpt2_triton.data.shards import open_shards, require_tokenizer, write_shard
from gpt2_triton.errors import UserError
from gpt2_triton.training.metrics import read_metrics
from gpt2_triton.training.run_info import read_run
from gpt2_triton.training.run_state import RunState
from tests.support import checkpoints
from tests.support.foreign import checkpoint_of, random_params
from tests.support.tiny import tiny_config

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "25"))
fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)

NUMBERS = st.one_of(
    st.integers(-3, 100),
    st.integers(-(2**70), 2**70),
    st.sampled_from([2**31 - 1, 2**31, -(2**31), 2**63, 10**9, 10**18, 10**4000]),
    st.floats(),
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.text(max_size=8))
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)


def places(tree, path=()):
    """Yield the path of every value inside a JSON tree."""
    inner = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in inner:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def changed(draw, tree):
    """A JSON tree in which one to three values are replaced or missing."""
    tree = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        *path, key = draw(st.sampled_from(sorted(places(tree), key=str) or [("new",)]))
        at = tree
        for step in path:
            at = at[step]
        if draw(st.integers(0, 3)) or isinstance(at, list):
            at[key] = draw(JSON)
        else:
            at.pop(key, None)
    return tree


@st.composite
def damaged(draw, data):
    """Bytes cut off, or with some overwritten, removed or added."""
    data = bytearray(data)
    if draw(st.integers(0, 3)) == 0:
        return bytes(data[: draw(st.integers(0, len(data)))])
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 8))] = draw(st.binary(max_size=8))
    return bytes(data)


def only_user_errors(function, *args):
    try:
        return function(*args)
    except UserError as error:
        assert str(error).strip()
        assert len(str(error)) < 20_000
        return None


# ---- configurations ----

YAML = b"""model: {n_layer: 2, n_head: 1, n_embd: 64, vocab_size: 256, block_size: 32}
data: {train: a.bin, val: b.bin, tokenizer: bytes}
train: &t
  steps: 8
  lr: 1e-3
eval: {every: 0, tokens: 0x10}
sample: {<<: *t, prompt: "x y"}
"""
WORDS = st.sampled_from([
    "model:", "n_layer:", "- ", "[", "]", "{", "}", "&a ", "*a", "<<: *a", "\n", "\n  ", "? ",
    "!!int ", "!!float x", "|", ">", "'", '"', "2001-99-99", "0b_", "1:2:3", "0x" + "f" * 5000,
    "9" * 5000, "!!binary x", "%YAML 9.9", "---", "...", "\t", "\0", "\ud7ff", ",", ": ", "~",
    ".inf", "yes", "!!set", "!!omap", "!!pairs", "!!timestamp x", "=",
])  # fmt: skip


@fuzz
@given(
    content=st.one_of(
        damaged(YAML),
        st.binary(max_size=60),
        st.lists(WORDS, max_size=12).map("".join).map(str.encode),
    )
)
def test_any_yaml_is_read_or_refused(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    only_user_errors(Config.load, path)
    only_user_errors(read_yaml, path)


KEYS = [key for key in places(tiny_config().to_dict()) if len(key) == 2]


@fuzz
@given(
    key=st.sampled_from(KEYS),
    value=JSON,
    second=st.sampled_from(KEYS),
    other=SCALARS,
    gpus=st.integers(1, 9),
)
def test_any_value_of_a_key_is_taken_or_refused(tmp_path, key, value, second, other, gpus):
    path = tmp_path / "x.yaml"
    path.write_text("{}")
    given = {".".join(key): value, ".".join(second): other}
    only_user_errors(Config.load, path, given, gpus)
    only_user_errors(
        Config.load, path, {name: str(value)[:5000] for name, value in given.items()}, gpus
    )


# ---- checkpoints ----


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a checkpoint whose weights are those of a model."""
    config = tiny_config(train=dict(dtype="bf16"))
    run = tmp_path_factory.mktemp("fuzz") / "run"
    checkpoint_of(run, config, {"params": random_params(config).to(torch.bfloat16)})
    return run


def load(run):
    """Read a run as a resume and as every other command does."""
    step_dir = find_checkpoint(run)
    checkpoint = open_checkpoint(step_dir)
    saved = checkpoint.state
    for tensor in checkpoint.tensors.values():
        checkpoints.whole(tensor)
    RunState.from_checkpoint(saved)
    resume.config_differences(saved["config"], tiny_config().to_dict())
    only_user_errors(resume.check_data, step_dir, saved["data"], [], "data.train x", False)
    only_user_errors(resume.check_tensors, checkpoint, {"params": torch.empty(3)})
    _, stored, _ = load_weights(str(run))
    for tensor in stored.values():
        checkpoints.whole(tensor)


@pytest.fixture
def restored(run):
    """The step directory, which gets its content back."""
    step_dir = find_checkpoint(run)
    before = {path.name: path.read_bytes() for path in step_dir.iterdir()}
    yield step_dir
    for path in step_dir.iterdir():
        path.unlink()
    for name, content in before.items():
        (step_dir / name).write_bytes(content)


@fuzz
@given(data=st.data())
def test_any_manifest_is_read_or_refused(run, restored, data):
    kept = (restored / MANIFEST).read_bytes()
    tree = changed(json.loads(kept)).map(lambda tree: json.dumps(tree).encode())
    (restored / MANIFEST).write_bytes(
        data.draw(st.one_of(tree, damaged(kept), st.binary(max_size=30)))
    )
    assert isinstance(verify(restored), str)
    only_user_errors(load, run)
    (restored / MANIFEST).write_bytes(kept)


def with_header(data, header):
    """Return a safetensors file with another header."""
    (length,) = struct.unpack_from("<Q", data)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def headers(data):
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    other = changed(header).map(lambda header: with_header(data, header))
    return st.one_of(other, damaged(data[: 8 + length]).map(lambda head: head + data[8 + length :]))


@fuzz
@given(data=st.data())
def test_any_header_of_tensors_is_read_or_refused(run, restored, data):
    path = restored / checkpoints.TENSORS
    kept = path.read_bytes()
    path.write_bytes(data.draw(headers(kept)))
    checkpoints.reseal(restored)
    only_user_errors(load, run)
    path.write_bytes(kept)


# ---- other projects' weights ----


def read_all(source):
    weights = open_weights(source)
    for name in weights.shapes:
        weights.read(name)


@pytest.fixture(scope="module")
def exported(run, tmp_path_factory):
    directory = tmp_path_factory.mktemp("exported")
    for kind in ("hf", "llmc"):
        export(str(run), directory / kind, kind, "fp32")
    return directory


@fuzz
@given(data=st.data())
def test_any_files_of_hugging_face_are_read_or_refused(exported, tmp_path, data):
    config = json.loads((exported / "hf" / "config.json").read_bytes())
    tensors = (exported / "hf" / "model.safetensors").read_bytes()
    which = data.draw(st.integers(0, 1))
    (tmp_path / "config.json").write_text(
        json.dumps(data.draw(changed(config)) if which else config)
    )
    (tmp_path / "model.safetensors").write_bytes(tensors if which else data.draw(headers(tensors)))
    only_user_errors(read_all, f"hf:{tmp_path}")


@fuzz
@given(data=st.data())
def test_any_file_of_llmc_is_read_or_refused(exported, tmp_path, data):
    content = (exported / "llmc" / "model.bin").read_bytes()
    numbers = list(struct.unpack_from("<8i", content))
    for _ in range(data.draw(st.integers(1, 3))):
        numbers[data.draw(st.integers(0, 7))] = data.draw(
            st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 70)
        )
    changed = struct.pack("<8i", *numbers) + content[32:]
    (tmp_path / "model.bin").write_bytes(
        data.draw(st.one_of(st.just(changed), damaged(content[:1100])))
    )
    only_user_errors(read_all, f"llmc:{tmp_path}/model.bin")


@fuzz
@given(tree=JSON, model=JSON, content=st.binary(max_size=40))
def test_any_checkpoint_of_nanogpt_is_read_or_refused(tmp_path, tree, model, content):
    path = tmp_path / "ckpt.pt"
    sizes = dict(n_layer=1, n_head=1, n_embd=64, vocab_size=256, block_size=8)
    for saved in (
        tree,
        {"model": model, "model_args": tree},
        {"model": {"w": model}, "model_args": sizes},
    ):
        torch.save(saved, path)
        only_user_errors(read_all, f"nanogpt:{path}")
    path.write_bytes(path.read_bytes()[:200] + content)
    only_user_errors(read_all, f"nanogpt:{path}")


# ---- data and records ----


@fuzz
@given(data=st.data(), vocab_size=st.sampled_from([2, 300, 65536]))
def test_any_shard_is_read_or_refused(tmp_path, data, vocab_size):
    path = tmp_path / "a.bin"
    write_shard(path, np.arange(300, dtype=np.uint16))
    content = path.read_bytes()
    head = struct.pack(
        "<3i", *data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=3, max_size=3))
    )
    path.write_bytes(
        data.draw(st.one_of(damaged(content), st.just(head + content[12:]), st.just(content)))
    )

    def read():
        [shard] = open_shards(str(path), vocab_size, 8)
        windows = Windows([shard], 8)
        path.write_bytes(data.draw(st.one_of(damaged(content), st.just(content))))
        windows.read(np.arange(windows.n))
        return shard.fingerprint

    only_user_errors(read)


@fuzz
@given(tree=JSON, content=st.binary(max_size=30))
def test_any_record_of_shards_and_runs_is_read_or_refused(tmp_path, tree, content):
    write_shard(tmp_path / "a.bin", np.arange(300, dtype=np.uint16))
    for record in (tree, {"tokenizer": tree, "shards": tree}, {"shards": {"a.bin": tree}}, content):
        for name in ("shards.json", "run.json"):
            written = record if isinstance(record, bytes) else json.dumps(record).encode()
            (tmp_path / name).write_bytes(written)
        only_user_errors(require_tokenizer, str(tmp_path / "*.bin"), "bytes")
        assert isinstance(is_done(tmp_path, {"tokenizer": "bytes"}), bool)
        assert isinstance(read_run(tmp_path), dict)


@fuzz
@given(lines=st.lists(JSON | st.fixed_dictionaries({"step": NUMBERS}), max_size=5))
def test_any_metrics_are_read_with_whole_steps(tmp_path, lines):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert all(isinstance(record["step"], int) for record in read_metrics(path))


def test_files_as_they_were_written_are_read(run, exported):
    """The files that the other tests change are good ones."""
    load(run)
    read_all(f"hf:{exported}/hf")
    read_all(f"llmc:{exported}/llmc/model.bin")
