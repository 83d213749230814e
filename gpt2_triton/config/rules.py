"""Rules between keys of the configuration; step_shape.py has the rules about the number of GPUs."""

import os
from collections.abc import Iterator

from gpt2_triton.config.schema import Sections, choices

Problem = tuple[str, str]  # a key, and what is wrong with it

HEAD_SIZES = (64, 80, 96, 128)  # the attention kernels are written and tested for these
ROTATED_HEAD_SIZES = (64, 128)
TOKENIZER_SIZES = {"gpt2": 50257, "llama3": 128256, "bytes": 256}
# OpenAI's models on the Hub
HUB_SIZES = {"gpt2": "d12", "gpt2-medium": "d24", "gpt2-large": "d36", "gpt2-xl": "d48"}
# tokens that a model of another project sees by default; Llama 3.1 takes 131,072
LONGEST_CONTEXT = 8192
# of init_from
INIT_SOURCES = {"checkpoint": "DIR", "hf": "DIR_OR_NAME", "llmc": "FILE", "nanogpt": "FILE"}


def conflicts(config: Sections) -> Iterator[Problem]:
    """Yield every rule that this configuration breaks on any number of GPUs."""
    yield from _model_conflicts(config)
    yield from _schedule_conflicts(config)


def _model_conflicts(config: Sections) -> Iterator[Problem]:
    m = config.model
    d = config.data
    t = config.train
    o = config.optim
    if m.head_dim is None and m.n_embd % m.n_head:
        yield (
            "model.n_head",
            f"{m.n_head} heads do not divide n_embd {m.n_embd}; {_fitting_heads(m.n_embd)}",
        )
    elif m.head_dim is None and m.head_size not in HEAD_SIZES:
        wrong = f"head size n_embd / n_head is {m.head_size}, not one of {HEAD_SIZES}"
        yield "model.n_head", f"{wrong}; {_fitting_heads(m.n_embd)}"
    for choice in choices(m):
        if choice.arch not in ("", m.arch):
            yield choice.key, f"{choice.value} is for model.arch {choice.arch}; remove it"
        if t.precision == "fp8" and not choice.fp8:
            yield "train.precision", f"fp8 has no {choice.key} {choice.value}; set it to bf16"
    if m.arch == "llama":
        yield from _llama_conflicts(config)
    if t.seq_len > m.block_size:
        longer = f"{t.seq_len} is longer than model.block_size {m.block_size}"
        yield "train.seq_len", f"{longer}; lower it or raise the other"
    needed = TOKENIZER_SIZES.get(d.tokenizer, 0)  # training/start.py asks a file
    if m.vocab_size < needed:
        expected = f"the {d.tokenizer} tokenizer has {needed} tokens"
        todo = (
            "model.vocab_size or data.tokenizer"
            if config.init_from == "scratch"
            else "data.tokenizer"
        )
        yield "model.vocab_size", f"{expected}, got {m.vocab_size}; set {todo}"
    if (d.train == "builtin") != (d.val == "builtin"):
        other = "data.train" if d.val == "builtin" else "data.val"
        yield (
            other,
            f"data.train is {d.train} and data.val is {d.val}; make both builtin, or neither",
        )
    if (o.tau is None) == (o.weight_decay is None):
        yield (
            "optim.tau",
            f"{o.tau} beside optim.weight_decay {o.weight_decay}; give one, and null for the other",
        )
    if o.adamw_lr and o.name == "adamw":
        yield (
            "optim.adamw_lr",
            "goes with optim.name muon; set optim.lr, which is AdamW's without Muon",
        )
    if o.master == "fp32" and t.dtype == "fp32":
        yield (
            "optim.master",
            "fp32 parameters are their own master copies; set it to none, or train.dtype to bf16",
        )
    if t.precision == "fp8" and t.dtype == "fp32":
        yield "train.precision", "fp8 needs train.dtype bf16, got fp32; set train.dtype to bf16"
    if t.precision == "fp8" and t.seq_len % 16:
        yield (
            "train.seq_len",
            f"train.precision fp8 needs a multiple of 16, got {t.seq_len}; change it",
        )
    source, _, path = config.init_from.partition(":")
    if config.init_from != "scratch" and not (source in INIT_SOURCES and path):
        known = ", ".join(f"{name}:{what}" for name, what in INIT_SOURCES.items())
        theirs = {"resume": "; use --resume"} | dict.fromkeys(
            HUB_SIZES, f"; use hf:openai-community/{source}"
        )
        for name, file in (("hf", "config.json"), ("checkpoint", "config.yaml")):
            if os.path.isfile(os.path.join(config.init_from, file)):
                theirs[source] = f"; did you mean {name}:{config.init_from}?"
        yield (
            "init_from",
            f"expected scratch or one of {known}; got {config.init_from}{theirs.get(source, '')}",
        )
    recompute = config.memory.recompute
    layers = recompute.partition(":")[2]
    if layers and int(layers) > m.n_layer:
        yield (
            "memory.recompute",
            f"{recompute} names more layers than model.n_layer {m.n_layer}; lower it",
        )


def vocabulary_note(config: Sections, tokens: int | None = None) -> list[str]:
    """Return a line if most of the model's vocabulary has no token; `tokens` are of a file."""
    rows, name = config.model.vocab_size, config.data.tokenizer
    tokens = tokens or TOKENIZER_SIZES.get(name, rows)
    wrong = f"model.vocab_size {rows:,}, but data.tokenizer {name} has {tokens:,} tokens"
    return [f"{wrong}: is another tokenizer meant?"] if rows > 2 * tokens else []


def _llama_conflicts(config: Sections) -> Iterator[Problem]:
    m = config.model
    if m.n_head % (m.n_kv_head or m.n_head):
        yield "model.n_kv_head", f"{m.n_kv_head} does not divide model.n_head {m.n_head}; change it"
    if m.head_size not in ROTATED_HEAD_SIZES:
        wrong = (
            f"head size {m.head_size} is not one of "
            f"{ROTATED_HEAD_SIZES}, which model.arch llama has"
        )
        yield "model.head_dim" if m.head_dim else "model.n_head", f"{wrong}; change it"
    if not m.tied and config.train.precision == "fp8" and config.fp8.keep_bf16 == "none":
        yield "fp8.keep_bf16", "an untied head stays in bf16: set fp8.keep_bf16 to head"


def _schedule_conflicts(config: Sections) -> Iterator[Problem]:
    t = config.train
    e = config.eval
    warmup = config.optim.warmup
    if warmup > t.steps:
        yield (
            "optim.warmup",
            f"{warmup} steps of warmup are more than train.steps {t.steps}; lower it",
        )
    if e.every and 0 < e.tokens < t.seq_len:
        yield (
            "eval.tokens",
            f"{e.tokens} is less than train.seq_len {t.seq_len}; raise it, or 0 takes all tokens",
        )
    if config.checkpoint.best == "val_loss" and not e.every:
        yield (
            "checkpoint.best",
            "there is no validation loss to compare; set eval.every, or this to none",
        )
    if t.patience and config.checkpoint.best != "val_loss":
        yield (
            "train.patience",
            "the best checkpoint would be lost; set checkpoint.best to val_loss, or this to 0",
        )
    if t.rewind_after and not config.checkpoint.every:
        yield (
            "train.rewind_after",
            "there is no checkpoint to go back to; set checkpoint.every, or this to 0",
        )


def _fitting_heads(n_embd: int) -> str:
    fitting = [str(n_embd // size) for size in HEAD_SIZES if n_embd % size == 0]
    return (
        f"set model.n_head to {' or '.join(fitting)}"
        if fitting
        else "set model.n_embd to a multiple of 64"
    )
