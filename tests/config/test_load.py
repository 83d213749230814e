"""Reading a configuration: a table of mistakes with the text that a user sees, overrides, sizes."""

import re

import pytest

from gpt2_triton.config.config import Config
from gpt2_triton.config.schema import MemoryConfig
from gpt2_triton.config.step_shape import StepShape
from gpt2_triton.errors import ConfigError

IN_A_FILE = [  # YAML, what the message says
    ("model: {n_layr: 6}", "x.yaml:1: model.n_layr: unknown key; did you mean model.n_layer?"),
    ("optim:\n  lrr: 1", "x.yaml:2: optim.lrr: unknown key; did you mean optim.lr?"),
    ("modle: {n_layer: 6}", "x.yaml:1: modle: unknown key"),
    ("weight_decay: 0.1", "x.yaml:1: weight_decay: unknown key; did you mean optim.weight_decay?"),
    ("optim.lr: 0.1", "x.yaml:1: optim.lr: unknown key; keys are nested: write lr under optim"),
    ("model: {n_layer: six}", "x.yaml:1: model.n_layer: must be a valid integer"),
    ("model: {n_layer: [1]}", "got [1] (transformer layers)"),
    ("model: {n_layer: yes}", "x.yaml:1: model.n_layer: must not be a boolean"),
    ("model: 6", "x.yaml:1: model: must be a section of keys, got 6"),
    (
        "train: {steps: 1.5}",
        "x.yaml:1: train.steps: must be a valid integer, got a number with a fractional part",
    ),
    ("optim: {lr: '0,001'}", "x.yaml:1: optim.lr: must be a valid number, got '0,001' (peak"),
    ("- model", "x.yaml: expected sections such as `model:` and `train:`, got list"),
    (
        "# all is commented out\n",
        "x.yaml: expected sections such as `model:` and `train:`, got nothing",
    ),
    (
        "train:\n  steps:",
        "x.yaml:2: train.steps: must be a valid integer, got null (optimizer steps)",
    ),
    ("data: {allow_changed: ~}", "must be a valid boolean, got null (true: resume"),
    ("fp8: {keep_bf16: qkv}", "x.yaml:1: fp8.keep_bf16: must be 'head' or 'none', got 'qkv'"),
    ("model:\n  n_layer: 1\n  n_layer: 2", "x.yaml:3: model.n_layer: given twice, first in line 2"),
    ("model: {n_layer: 1", "x.yaml:1:19: not valid YAML"),
    ("model:\n\tn_layer: 1", "x.yaml:2:1: not valid YAML"),
    (
        "a: !!python/object/apply:os.getcwd []",
        "x.yaml:1:4: not valid YAML: could not determine a constructor",
    ),
    ("optim: {lr: 0}", "x.yaml:1: optim.lr: must be greater than 0, got 0 (peak learning rate)"),
    ("optim: {lr: .nan}", "x.yaml:1: optim.lr: must be a finite number"),
    (
        "parallel: {gpus: 3}",
        "524288 is no multiple of 3072, train.seq_len times GPUs (3); start a number of GPUs",
    ),
    ("optimizer: {lr: 1}", "x.yaml:1: optimizer: unknown key; train --help lists them"),
    (
        "bias: false",
        "x.yaml:1: bias: unknown key; nanoGPT's bias has no counterpart here: models have biases",
    ),
    ("data: {path: x}", "x.yaml:1: data.path: unknown key; data has train, val, tokenizer, seed"),
    ("every: 3", "; did you mean eval.every or sample.every or checkpoint.every or log.every?"),
    (
        "max_iters: 3",
        "x.yaml:1: max_iters: unknown key; for nanoGPT's max_iters use train.steps, one more: ",
    ),
    (
        "train: {block_size: 3}",
        "for nanoGPT's block_size use train.seq_len, at most model.block_size",
    ),
    ("init_from: resume", "nanogpt:FILE; got resume; use --resume"),
    ("init_from: gpt2-xl", "got gpt2-xl; use hf:openai-community/gpt2-xl"),
    (
        "model: {size: d12, n_layer: 3}",
        "model.size: d12 has n_layer 12, but n_layer is 3; remove one",
    ),
    (
        "model: {n_head: 7}",
        "x.yaml:1: model.n_head: 7 heads do not divide n_embd 768; set model.n_head to 12 or",
    ),
    (
        "data: {tokenizer: nowhere}",
        "x.yaml:1: data.tokenizer: must be gpt2, llama3, bytes, or an existing tokenizer.json or",
    ),
    (
        "model: {arch: llama, n_head: 8}",
        "x.yaml:1: model.n_head: head size n_embd / n_head is 96, not one of (64, 128); "
        "set model.n_head to 12 or 6",
    ),
    (
        "model: {arch: llama, n_kv_head: 5}",
        "x.yaml:1: model.n_kv_head: 5 does not divide model.n_head 12; change",
    ),
    (
        "model: {arch: llama, head_dim: 80}",
        "x.yaml:1: model.head_dim: head size 80 is not one of (64, 128), which model.arch llama",
    ),
    ("model: {n_kv_head: 4}", "x.yaml:1: model.n_kv_head: 4 is for model.arch llama; remove it"),
    (
        "checkpoint: {best: val_loss}\neval: {every: 0}",
        "x.yaml:1: checkpoint.best: there is no validation loss",
    ),
    (
        "init_from: gpt2",
        "x.yaml:1: init_from: expected scratch or one of checkpoint:DIR, hf:DIR_OR_NAME",
    ),
    (
        "train: {total_batch_tokens: 1500}",
        "1500 is no multiple of 1024, train.seq_len times GPUs (1); set it to 1024 or 2048",
    ),
    (
        "train: {total_batch_tokens: 524288, batch_size: 48}",
        "48 does not divide the 512 sequences of a step on each GPU (total_batch_tokens 524288); "
        "set it to 32, or, in a new run, total_batch_tokens to 491520",
    ),
]
MISTAKES = [  # YAML, overrides, what the message says
    *((text, {}, message) for text, message in IN_A_FILE),
    (
        "",
        {"optim": {"lr": 1}},
        "optim: got a dictionary, expected a value for each dotted key, such as optim.lr",
    ),
    ("", {"train.steps": "1,000"}, "train.steps: must be a valid integer, got '1,000'"),
    ("", {"train.steps": "1.2345k"}, "train.steps: must be a valid integer, got '1.2345k'"),
    (
        "optim: {weight_decay: 0.1}",
        {"optim.tau": "4"},
        "optim.tau: 4.0 beside optim.weight_decay 0.1; give one",
    ),
    ("", {"optim.adamw_lr": "1e-3"}, "optim.adamw_lr: goes with optim.name muon; set optim.lr"),
    (
        "",
        {"optim.weight_decay": "null"},
        "optim.tau: None beside optim.weight_decay None; give one",
    ),
    ("", {"memory.recompute": "all"}, "memory.recompute: must be auto, none, gelu"),
    ("", {"memory.recompute": "none:2"}, "or gelu+ln:4 for 4 layers, got 'none:2'"),
    (
        "",
        {"memory.recompute": "gelu:13"},
        "memory.recompute: gelu:13 names more layers than model.n_layer 12",
    ),
    ("", {"model.n_embd": "770"}, "model.n_embd: must be a multiple of 16"),
    (
        "",
        {"gradient_accumulation_steps": "8"},
        "use train.total_batch_tokens, in tokens of all GPUs: "
        "gradient_accumulation_steps * batch_size * block_size",
    ),
    ("", {"model.size": "d13"}, "model.size: unknown size d13; known are d6"),
    (
        "model: {vocab_size: 256}",
        {"model.size": "qwen3:0.6b"},
        "qwen3:0.6b has vocab_size 151936, but vocab_size is 256; remove one",
    ),
    (
        "",
        {"model.n_head": "24"},
        "model.n_head: head size n_embd / n_head is 32, not one of (64, 80, 96, 128); set",
    ),
    (
        "",
        {"train.precision": "fp8", "train.dtype": "fp32"},
        "train.precision: fp8 needs train.dtype bf16, got fp32",
    ),
    (
        "",
        {"train.precision": "fp8", "train.seq_len": "8"},
        "train.seq_len: train.precision fp8 needs a multiple of",
    ),
    (
        "model: {arch: llama, tied: false}",
        {"train.precision": "fp8"},
        "fp8.keep_bf16: an untied head stays in bf16",
    ),
    (
        "",
        {"train.steps": "100"},
        "optim.warmup: 700 steps of warmup are more than train.steps 100; lower it",
    ),
    (
        "train: {rewind_after: 3}",
        {"checkpoint.every": "0"},
        "x.yaml:1: train.rewind_after: there is no checkpoint to go back to",
    ),
    ("", {"train.seq_len": "2048"}, "train.seq_len: 2048 is longer than model.block_size 1024"),
    (
        "",
        {"model.vocab_size": "256"},
        "the gpt2 tokenizer has 50257 tokens, got 256; set model.vocab_size or data.tok",
    ),
    (
        "init_from: hf:x",
        {"model.vocab_size": "256"},
        "has 50257 tokens, got 256; set data.tokenizer",
    ),
    (
        "",
        {"train.patience": "3"},
        "train.patience: the best checkpoint would be lost; set checkpoint.best",
    ),
    ("", {"data.train": "builtin"}, "make both builtin, or neither"),
    (
        "data: {train: builtin, val: builtin}",
        {"data.train": "x.bin"},
        "data.train: data.train is x.bin and data.val",
    ),
    (
        "",
        {"train.dtype": "fp32", "optim.master": "fp32"},
        "fp32 parameters are their own master copies",
    ),
    ("", {"eval.tokens": "1023"}, "eval.tokens: 1023 is less than train.seq_len 1024"),
]


@pytest.mark.parametrize(("text", "overrides", "message"), MISTAKES)
def test_load_reports_a_mistake_with_its_place(tmp_path, monkeypatch, text, overrides, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(text or "{}")
    with pytest.raises(ConfigError) as caught:
        Config.load("x.yaml", overrides)
    assert message in str(caught.value)


def test_load_reports_all_mistakes_at_once(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("optim:\n  lr: -1\n  beta1: 2\nlog: {evry: 3}\n")
    with pytest.raises(ConfigError) as caught:
        Config.load(path, {"train.steps": "0"})
    places = {line.rpartition("/")[2].split(": ")[0] for line in str(caught.value).splitlines()}
    assert places == {"train.steps", "x.yaml:2", "x.yaml:3", "x.yaml:4"}
    with pytest.raises(ConfigError) as caught:
        Config.load({}, {"model.n_head": "7", "train.seq_len": "4096", "init_from": "x"})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(("name", "file"), [("hf", "config.json"), ("checkpoint", "config.yaml")])
def test_load_says_what_a_bare_directory_of_init_from_is(tmp_path, name, file):
    (tmp_path / file).touch()
    with pytest.raises(
        ConfigError, match=f"init_from: .*; got {tmp_path}; did you mean {name}:{tmp_path}\\?$"
    ):
        Config.load({"init_from": str(tmp_path)})


def test_load_names_an_unreadable_file(tmp_path):
    with pytest.raises(ConfigError, match="emty.yaml: .*No such file or directory$"):
        Config.load(tmp_path / "emty.yaml")
    with pytest.raises(ConfigError, match="Is a directory$"):
        Config.load(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    hint = f"it is a run: continue it with {run}/config.yaml --run_dir {run} --resume"
    with pytest.raises(ConfigError, match=re.escape(f"Is a directory; {hint}")):
        Config.load(run)
    with pytest.raises(ConfigError, match="File name too long"):
        Config.load(tmp_path / f"{'a' * 300}.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"sample: {prompt: \xe9}")
    with pytest.raises(ConfigError, match="not valid YAML: .utf-8. codec"):
        Config.load(tmp_path / "latin.yaml")


def test_load_prefers_overrides_to_file_to_defaults(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("optim: {lr: 3e-4, warmup: 5}\nmemory:\n")
    config = Config.load(
        path, {"optim.lr": "1e-3", "train.total_batch_tokens": "65_536", "memory.head_rows": "null"}
    )
    assert (config.optim.lr, config.optim.warmup, config.optim.beta2) == (1e-3, 5, 0.95)
    assert config.train.total_batch_tokens == 65536
    assert config.memory == MemoryConfig()
    assert Config.load(config, {"optim.warmup": 7}) == config.replace(optim={"warmup": 7})


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1e3", 1000),
        ("1.5e3", 1500),
        ("10B", 10**10),
        ("1.5M", 1_500_000),
        ("64k", 64_000),
        ("1_000", 1000),
    ],
)
def test_load_takes_whole_numbers_as_people_write_them(tmp_path, text, number):
    (tmp_path / "x.yaml").write_text(f"train: {{steps: {text}}}\n")
    config = Config.load(tmp_path / "x.yaml", {"eval.every": text, "memory.head_rows": text})
    assert (config.train.steps, config.eval.every, config.memory.head_rows) == (
        number,
        number,
        number,
    )


def test_load_takes_yaml_merge_keys(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("eval: &e {every: 7}\nsample:\n  <<: *e\n  every: 9\n")
    assert Config.load(path).sample.every == 9


def test_model_size_override_replaces_keys_of_the_file(tmp_path):
    (tmp_path / "x.yaml").write_text(
        "model:\n  n_layer: 2\n  n_head: 1\n  n_embd: 64\n"
        "  vocab_size: 300\ndata: {tokenizer: bytes}\n"
    )
    m = Config.load(tmp_path / "x.yaml", {"model.size": "d12", "model.block_size": "2048"}).model
    assert (m.n_layer, m.n_embd, m.n_head, m.block_size, m.vocab_size) == (12, 768, 12, 2048, 300)


def test_override_replaces_a_key_of_the_files_size(tmp_path):
    (tmp_path / "x.yaml").write_text("model: {size: 'llama:c768', qk_norm: true}\n")
    whole = Config.load(tmp_path / "x.yaml").model
    less = Config.load(tmp_path / "x.yaml", {"model.n_layer": "2", "model.n_inner": 512}).model
    assert less == whole.model_copy(update=dict(n_layer=2, n_inner=512)) and less.qk_norm
    with pytest.raises(ConfigError, match="d12 has n_layer 12, but n_layer is 2; remove one"):
        Config.load(tmp_path / "x.yaml", {"model.size": "d12", "model.n_layer": 2})


def test_batch_must_divide_on_the_gpus_of_the_run(tmp_path):
    """96 sequences do not divide into batches of 64, on 8 GPUs they are 12 each."""
    (tmp_path / "x.yaml").write_text(
        "train: {batch_size: 64, seq_len: 128, total_batch_tokens: 12288}\n"
    )
    with pytest.raises(ConfigError, match="the 96 sequences of a step"):
        Config.load(tmp_path / "x.yaml")
    shape = StepShape.of(Config.load(tmp_path / "x.yaml", gpus=8), 8)
    assert (shape.micro_batch, shape.accumulation) == (12, 1)
    with pytest.raises(ConfigError, match="GPUs .5.;"):
        Config.load(tmp_path / "x.yaml", gpus=5)


def test_a_mistake_beside_a_recipe_has_no_line_of_the_recipe():
    with pytest.raises(
        ConfigError, match="^quickstart: model.n_head: head size n_embd / n_head is 400"
    ):
        Config.load("quickstart", {"model.n_embd": "800"})


def test_init_from_a_directory_brings_its_tokenizer(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    weights = {"init_from": f"hf:{tmp_path}"}
    assert Config.load("gpt2_124m", weights).data.tokenizer == str(tmp_path)
    assert Config.load("gpt2_124m", weights | {"data.tokenizer": "gpt2"}).data.tokenizer == "gpt2"
    (tmp_path / "tokenizer.json").unlink()
    assert Config.load("gpt2_124m", weights).data.tokenizer == "gpt2"


def test_a_configuration_of_nanogpt_is_no_yaml(tmp_path):
    file = tmp_path / "train_shakespeare_char.py"
    file.write_text("out_dir = 'out'\neval_interval = 250 # often\nbatch_size = 64\n")
    with pytest.raises(ConfigError, match="char.py: expected YAML; .* nanoGPT's options"):
        Config.load(file)
