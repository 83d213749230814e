"""Compares tokens and texts with transformers' on 300 texts that are hard for a tokenizer.

    python -m benchmarks.accuracy.tokenizers gpt2 llama3 models/SmolLM2-135M

Texts are made of letters of several scripts, combining marks, emoji, control characters, digits,
runs of whitespace and code.  A difference counts a text; `streamed` is text that comes in pieces.
"""

import random
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.record import CURRENT, ROOT, Target
from gpt2_triton.checkpoint import hf_tokenizer
from gpt2_triton.commands.app import main, make_app
from gpt2_triton.data.tokenizer import NAMES, get_tokenizer
from gpt2_triton.inference.sample import stream_text

TEXTS, MOST = 300, 80  # texts, and parts of one
SCRIPTS = (  # first and last code point
    *((0x20, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF)),
    *((0x600, 0x6FF), (0x900, 0x97F), (0xE00, 0xE7E), (0xAC00, 0xD7A3), (0x4E00, 0x9FFE)),
    *((0x3040, 0x30FF), (0x1F300, 0x1F6FE), (0x2000, 0x206E), (0, 0x1F), (0x7F, 0x9F)),
    *((0x2100, 0x27BE), (0x30, 0x39), (0xE000, 0xE00F), (0x20000, 0x2004F)),
)
PARTS = (
    " ",
    "\n",
    "\t",
    "  ",
    "\r\n",
    "\u3000",
    "\u00a0",
    "e\u0301",
    "\u200d",
    "\ufe0f",
    "1,000.5e-3",
)

app = make_app("python -m benchmarks.accuracy.tokenizers", "Tokens beside transformers'.")


def hard_texts() -> list[str]:
    """Return the texts, equal in every call."""
    draw = random.Random(0)
    source = (ROOT / "gpt2_triton" / "data" / "tokenizer.py").read_text(encoding="utf-8")
    code = [line for line in source.splitlines() if line]  # an empty text tells nothing
    texts = []
    for i in range(TEXTS):
        scripts = draw.sample(SCRIPTS, 3)
        letters = [chr(draw.randint(*draw.choice(scripts))) for _ in range(draw.randint(1, MOST))]
        parts = [letter if draw.random() < 0.75 else draw.choice(PARTS) for letter in letters]
        lines = code[draw.randrange(len(code)) :][: draw.randint(1, 12)]
        texts.append("\n".join(lines) if i % 5 == 0 else "".join(parts))
    return texts


def differences(name: str, folder: Path) -> Counter[str]:
    """Count the texts that differ from those of transformers' tokenizer in a folder."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    ours = get_tokenizer(name)
    found = Counter(dict.fromkeys(("tokens", "ordinary", "text", "streamed"), 0))
    for text in hard_texts():
        ids = theirs.encode(text, add_special_tokens=False)
        ordinary = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        back = theirs.decode(ids, clean_up_tokenization_spaces=False)
        found["tokens"] += ours.encode(text, special=True).tolist() != ids
        found["ordinary"] += ours.encode(text).tolist() != ordinary
        found["text"] += ours.decode(ids) != back
        found["streamed"] += "".join(stream_text(ours, ids)) != back
    return found


@app.default
def compare(*tokenizers: str, target: Target = CURRENT) -> int:
    """Write the record's section `tokenizers`; return 1 if a text differs.

    Args:
        tokenizers: Names as data.tokenizer has them; by default gpt2 and llama3.
    """
    figures: dict[str, int] = {"texts": TEXTS}
    for name in tokenizers or ("gpt2", "llama3"):
        with tempfile.TemporaryDirectory() as exported:
            folder = Path(exported if name in NAMES else name)
            if name in NAMES:
                hf_tokenizer.write(folder, get_tokenizer(name), block_size=1024)
            found = differences(name, folder)
        print(f"{name}: {dict(found)} of {TEXTS} texts", flush=True)
        figures |= {f"{Path(name).name}.{what}": count for what, count in found.items()}
    target.write("tokenizers", figures, "transformers", "tokenizers", "tiktoken")
    return int(any(count for key, count in figures.items() if "." in key))


if __name__ == "__main__":
    sys.exit(main(app, sys.argv[1:]))
