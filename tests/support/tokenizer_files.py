"""Small files tokenizer.json of the two common kinds, and texts that are hard for a tokenizer."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PROSE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the "
    "age of foolishness: été naïve façade, Ελλάδα, Việt 123 45.\n"
    "\tdef f(x):\n        return x + 1\n"
)
HARD = [
    "",
    " ",
    "  two  and   three ",
    "\n\n\ta\r\n b\u00a0c\u2003d\u200b",
    "e\u0301 o\u0302\u0323 \u0915\u094d\u0937",
    "👩‍👩‍👧‍👦 🇬🇷🙂 ☺️",
    "漢字かなカナ 한국어 ไทย",
    "שלום עולם مرحبا بالعالم \u202eabc\u202c",
    "\x00\x01\x1b[0m\x7f\u0085",
    "if (a != b) { return x->y[0] ** 2; } // tail\\n",
    "3.14159 1,000,000 0x1F 12345678901234567890 ½ ² ٣",
    "<|endoftext|></s><s>[INST] <|im_start|>user",
    "I'LL don't WE'VE it's",
    "word" * 40,
    "a" + " " * 60 + "b" + "\t" * 9,
    "\ufeffBOM \ufffd \U0010ffff",
]


def byte_level(folder: Path, vocab: int = 345, config: bool = True) -> Path:
    """Write GPT-2's kind: bytes in its spelling, digits alone as SmolLM2's, two special tokens."""
    tokenizer = Tokenizer(models.BPE())
    splits = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    return _save(tokenizer, folder, {"eos_token": "<|im_end|>"} if config else None)


def sentencepiece(folder: Path) -> Path:
    """Write Llama 2's kind: words after ▁, bytes for unknown characters, <s> before every text."""
    words = ["▁it", "▁was", "▁the", "▁of", "age", "▁a", "it", "was", "the", "of", "ag", "▁i", "▁w"]
    words += ["▁wa", "▁t", "▁th", "▁o", "wa", "th"]
    letters = sorted({c for c in "".join(words)} | set("bcdefghijklmnopqrsuvxyz ABIW.,:▁"))
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *letters, *words]
    vocab = [*dict.fromkeys(vocab)]
    ids = {token: i for i, token in enumerate(vocab)}
    merges = []
    for word in sorted((w for w in vocab[259:] if len(w) > 1), key=lambda w: (len(w), w)):
        pair = next((word[:i], word[i:]) for i in range(len(word) - 1, 0, -1) if word[:i] in ids)
        merges += [pair] if pair[1] in ids else []
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in vocab[:3]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return _save(
        tokenizer,
        folder,
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
    )


def _save(tokenizer: Tokenizer, folder: Path, config: dict | None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / "tokenizer_config.json").write_text(json.dumps(kind | config))
    return folder
