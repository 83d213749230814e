"""Train a byte-level BPE on text: GPT-2's splitting, and tokens that are frequent in this text.

The last tenth of the text is held out, to say how many bytes a token has.
"""

import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpt2_triton.console import print_line
from gpt2_triton.data.prepare import text
from gpt2_triton.data.prepare.text import MeasuredText
from gpt2_triton.data.tokenizer import Tokenizer, get_tokenizer
from gpt2_triton.data.tokenizer_file import CONFIG, END_OF_TEXT, FILE, FileTokenizer
from gpt2_triton.errors import DataError
from gpt2_triton.files import new_directory, write_json

HELD_OUT = 0.1  # of the characters
HELD_OUT_CHARACTERS = 1 << 22  # most of them that are tokenised


def train_tokenizer(measured: MeasuredText, vocab: int, out: Path) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json into the new directory `out`; return lines
    about it.  The same text gives the same files.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    cut = int(measured.characters * (1 - HELD_OUT))
    if not cut:
        raise DataError(f"{measured.characters} characters are too little text; give more")
    held_out: list[str] = []
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    names = dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT)
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    pieces = _pieces(measured, cut, held_out)
    # in the main thread the library, in Rust, would keep a Ctrl-C until its end, or lose it
    thread = ThreadPoolExecutor(1)
    try:
        with new_directory(out) as directory:
            thread.submit(trained.train_from_iterator, pieces, trainer).result()
            trained.save(str(directory / FILE))
            write_json(directory / CONFIG, config | names)
    except KeyboardInterrupt:
        print_line("error: interrupted", error=True)
        os._exit(130)  # Python's own end would wait for the thread
    return _compared(FileTokenizer(str(out)), vocab, held_out)


def _pieces(measured: MeasuredText, cut: int, held_out: list[str]) -> Iterator[str]:
    """Yield the first `cut` characters of the text; put a sample of the others into `held_out`."""
    taken = 0
    for split, _, part in text.split_documents(measured.texts(), cut):
        if split == "train":
            yield part
        elif taken < HELD_OUT_CHARACTERS:
            held_out.append(part[: HELD_OUT_CHARACTERS - taken])
            taken += len(part)


def _compared(own: FileTokenizer, vocab: int, held_out: list[str]) -> list[str]:
    """Return lines: the size of the tokenizer, and its bytes per token beside GPT-2's."""
    size = sum(len(part.encode()) for part in held_out)

    def shown(tokenizer: Tokenizer) -> str:
        return f"{text.bytes_per_token(tokenizer, held_out):.2f}"

    lines = [f"{own.vocab_size:,} tokens, {shown(own)} bytes per token on {size:,} bytes held out"]
    if own.vocab_size < vocab:
        lines[0] += f"; the text has no more pairs that occur twice ({vocab:,} were asked for)"
    try:
        gpt2 = get_tokenizer("gpt2")
    except DataError as error:  # no network
        return [*lines, f"not compared with GPT-2's: {str(error).partition(';')[0]}"]
    return [*lines, f"GPT-2's {gpt2.vocab_size:,} tokens have {shown(gpt2)}"]
