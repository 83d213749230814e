"""Rules between keys of the configuration; step_shape.py has the rules about the number of GPUs."""

import os
from collections.abc import Iterator, Sequence

from gpt2_triton.config.schema import Sections, choices
from gpt2_triton.config.values import TOKENIZER_SIZES

Problem = tuple[str, str]  # a key, and what is wrong with it

# columns of a head, by model.arch: the attention kernels are written and tested for these
HEAD_SIZES = {"gpt2": (64, 80, 96, 128), "llama": (64, 128)}
# OpenAI's models on the Hub
HUB_SIZES = {"gpt2": "d12", "gpt2-medium": "d24", "gpt2-large": "d36", "gpt2-xl": "d48"}
# tokens that a model of another project sees by default; Llama 3.1 takes 131,072
LONGEST_CONTEXT = 8192
# of init_from
INIT_SOURCES = {"checkpoint": "DIR", "hf": "DIR_OR_NAME", "llmc": "FILE", "nanogpt": "FILE"}


def conflicts(config: Sections) -> Iterator[Problem]:
    """Yield every rule that this configuration breaks on any number of GPUs."""
    yield from _head_conflicts(config)
    yield from _choice_conflicts(config)
    if config.model.arch == "llama":
        yield from _llama_conflicts(config)
    yield from _data_conflicts(config)
    yield from _optimizer_conflicts(config)
    yield from _fp8_conflicts(config)
    yield from _source_conflicts(config.init_from)
    yield from _recompute_conflicts(config)
    yield from _schedule_conflicts(config)


def _head_conflicts(config: Sections) -> Iterator[Problem]:
    m = config.model
    if m.head_dim is not None:
        return
    sizes = HEAD_SIZES[m.arch]
    todo = _fitting_heads(m.n_embd, sizes)
    if m.n_embd % m.n_head:
        yield "model.n_head", f"{m.n_head} heads do not divide n_embd {m.n_embd}; {todo}"
    elif m.head_size not in sizes:
        wrong = f"head size n_embd / n_head is {m.head_size}, not one of {sizes}"
        yield "model.n_head", f"{wrong}; {todo}"


def _choice_conflicts(config: Sections) -> Iterator[Problem]:
    """Yield what the model's choices do not go with, by their declarations."""
    fp8 = config.train.precision == "fp8"
    for choice in choices(config.model):
        if choice.arch not in ("", config.model.arch):
            yield choice.key, f"{choice.value} is for model.arch {choice.arch}; remove it"
        if fp8 and not choice.fp8:
            yield "train.precision", f"fp8 has no {choice.key} {choice.value}; set it to bf16"


def _data_conflicts(config: Sections) -> Iterator[Problem]:
    m = config.model
    d = config.data
    T = config.train.seq_len
    if m.block_size < T:
        longer = f"{T} is longer than model.block_size {m.block_size}"
        yield "train.seq_len", f"{longer}; lower it or raise the other"
    needed = TOKENIZER_SIZES.get(d.tokenizer, 0)  # training/start.py asks a file
    if m.vocab_size < needed:
        wrong = f"the {d.tokenizer} tokenizer has {needed} tokens, got {m.vocab_size}"
        model_or = "model.vocab_size or " if config.init_from == "scratch" else ""
        yield "model.vocab_size", f"{wrong}; set {model_or}data.tokenizer"
    if (d.train == "builtin") != (d.val == "builtin"):
        other = "data.train" if d.val == "builtin" else "data.val"
        wrong = f"data.train is {d.train} and data.val is {d.val}"
        yield other, f"{wrong}; make both builtin, or neither"


def _optimizer_conflicts(config: Sections) -> Iterator[Problem]:
    o = config.optim
    if (o.tau is None) == (o.weight_decay is None):
        wrong = f"{o.tau} beside optim.weight_decay {o.weight_decay}"
        yield "optim.tau", f"{wrong}; give one, and null for the other"
    if o.adamw_lr and o.name == "adamw":
        todo = "set optim.lr, which is AdamW's without Muon"
        yield "optim.adamw_lr", f"goes with optim.name muon; {todo}"
    if o.master == "fp32" and config.train.dtype == "fp32":
        wrong = "fp32 parameters are their own master copies"
        yield "optim.master", f"{wrong}; set it to none, or train.dtype to bf16"


def _fp8_conflicts(config: Sections) -> Iterator[Problem]:
    t = config.train
    if t.precision != "fp8":
        return
    if t.dtype == "fp32":
        yield "train.precision", "fp8 needs train.dtype bf16, got fp32; set train.dtype to bf16"
    if t.seq_len % 16:
        needed = "train.precision fp8 needs a multiple of 16"
        yield "train.seq_len", f"{needed}, got {t.seq_len}; change it"


def _source_conflicts(init_from: str) -> Iterator[Problem]:
    source, _, path = init_from.partition(":")
    if init_from == "scratch" or (source in INIT_SOURCES and path):
        return
    todo = "; use --resume" if source == "resume" else ""
    if source in HUB_SIZES:
        todo = f"; use hf:openai-community/{source}"
    for name, file in (("hf", "config.json"), ("checkpoint", "config.yaml")):
        if os.path.isfile(os.path.join(init_from, file)):
            todo = f"; did you mean {name}:{init_from}?"
    known = ", ".join(f"{name}:{what}" for name, what in INIT_SOURCES.items())
    yield "init_from", f"expected scratch or one of {known}; got {init_from}{todo}"


def _recompute_conflicts(config: Sections) -> Iterator[Problem]:
    recompute = config.memory.recompute
    L = config.model.n_layer
    layers = recompute.partition(":")[2]
    if layers and int(layers) > L:
        more = f"{recompute} names more layers than model.n_layer {L}"
        yield "memory.recompute", f"{more}; lower it"


def _llama_conflicts(config: Sections) -> Iterator[Problem]:
    m = config.model
    if m.n_head % (m.n_kv_head or m.n_head):
        yield "model.n_kv_head", f"{m.n_kv_head} does not divide model.n_head {m.n_head}; change it"
    sizes = HEAD_SIZES["llama"]
    if m.head_dim and m.head_dim not in sizes:
        wrong = f"head size {m.head_dim} is not one of {sizes}, which model.arch llama has"
        yield "model.head_dim", f"{wrong}; change it"
    if not m.tied and config.train.precision == "fp8" and config.fp8.keep_bf16 == "none":
        yield "fp8.keep_bf16", "an untied head stays in bf16: set fp8.keep_bf16 to head"


def _schedule_conflicts(config: Sections) -> Iterator[Problem]:
    t = config.train
    e = config.eval
    warmup = config.optim.warmup
    if warmup > t.steps:
        wrong = f"{warmup} steps of warmup are more than train.steps {t.steps}"
        yield "optim.warmup", f"{wrong}; lower it"
    if e.every and 0 < e.tokens < t.seq_len:
        wrong = f"{e.tokens} is less than train.seq_len {t.seq_len}"
        yield "eval.tokens", f"{wrong}; raise it, or 0 takes all tokens"
    if config.checkpoint.best == "val_loss" and not e.every:
        todo = "set eval.every, or this to none"
        yield "checkpoint.best", f"there is no validation loss to compare; {todo}"
    if t.patience and config.checkpoint.best != "val_loss":
        todo = "set checkpoint.best to val_loss, or this to 0"
        yield "train.patience", f"the best checkpoint would be lost; {todo}"
    if t.rewind_after and not config.checkpoint.every:
        todo = "set checkpoint.every, or this to 0"
        yield "train.rewind_after", f"there is no checkpoint to go back to; {todo}"


def _fitting_heads(n_embd: int, sizes: Sequence[int]) -> str:
    fitting = [str(n_embd // size) for size in sizes if n_embd % size == 0]
    if fitting:
        return f"set model.n_head to {' or '.join(fitting)}"
    return "set model.n_embd to a multiple of 64"
