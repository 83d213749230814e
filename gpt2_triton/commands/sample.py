"""Command `sample`: print texts that a model writes."""

import itertools
import re
import sys
import time
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from gpt2_triton.commands.app import AT_LEAST_1, Checkpoint, Special, select_device
from gpt2_triton.console import counted, format_count, print_line, printable
from gpt2_triton.errors import ConfigError
from gpt2_triton.inference.sampling import Sampling


def sample(
    checkpoint: Checkpoint,
    /,
    *,
    prompt: Annotated[list[str] | None, Parameter(allow_leading_hyphen=True)] = None,
    prompt_file: Annotated[Path | None, Parameter(allow_leading_hyphen=True)] = None,
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 42,
    num: Annotated[int, AT_LEAST_1] = 1,
    batch: Annotated[int, AT_LEAST_1] = 64,
    special: Special = True,
) -> None:
    """Print texts that a model writes.  A text stops at a token that ends
    a text, which is not printed.

    Args:
        prompt: Text to continue; empty starts at the end-of-text token. May be given several times.
        prompt_file: File in UTF-8 with a further prompt on each line that is not empty; - reads
            stdin.
        tokens: Largest number of tokens of each text, without the prompt.
        temperature: Softmax temperature; 0 takes the most likely token.
        top_k: Sample among the k most likely tokens; 0 among all.
        top_p: Of the tokens that top_k keeps, sample among the fewest that together
            have probability p; 1 among all.
        seed: Seed of each prompt's first text; each next text adds 1.
        num: Number of texts of each prompt; between texts stands ---.
        batch: Largest number of texts decoded at once, fewer in short memory; the first is
            printed meanwhile. It changes the speed, not the random numbers of a text.
    """
    sampling = Sampling(temperature, top_k, top_p)
    sampling.check("--", tokens, seed)
    prompts = list(prompt or [])
    if prompt_file:
        prompts += _lines(prompt_file)
    prompts = prompts or [""]
    select_device(silent=True)  # stdout is the text
    from gpt2_triton.checkpoint.sources import load_weights
    from gpt2_triton.data.tokenizer import encode_prompt, get_tokenizer, special_names
    from gpt2_triton.inference.load import load_for_decoding
    from gpt2_triton.inference.sample import draw, ends_of_text, limit, stream_text
    from gpt2_triton.model.compiling import compile_decoding

    config, stored, beside = load_weights(checkpoint)
    model = load_for_decoding(config, stored, min(len(prompts) * num, batch))
    tokenizer = get_tokenizer(config.data.tokenizer)
    limit(model, tokenizer)
    names = special_names(tokenizer) if special else []
    found = sum(text.count(name) for text in prompts for name in names)
    if found:
        print_line(f"special tokens in the prompts: {found:,}", error=True)
    if model.arena.is_cuda:
        compile_decoding(model, *sampling)
    shown = printable if sys.stdout.isatty() else str  # a file or a pipe gets the text as it is
    texts = [(text, seed + i) for text in prompts for i in range(num)]
    seeds = [number for _, number in texts]
    encoded = [encode_prompt(tokenizer, text, special).tolist() for text, _ in texts]
    start = time.perf_counter()
    count = 0
    drawn_texts = draw(model, encoded, tokens, sampling, seeds, ends_of_text(tokenizer, beside))
    for n, ((text, _), ids, drawn) in enumerate(zip(texts, encoded, drawn_texts, strict=True)):
        printed, again = itertools.tee(drawn)
        print(f"---\n{shown(text)}" if n else shown(text), end="", flush=True)
        for piece in stream_text(tokenizer, printed, ids):
            print(shown(piece), end="", flush=True)
        print(flush=True)
        count += len([*again])
    seconds = time.perf_counter() - start
    slow = ""
    if model.arena.is_cpu:
        slow = " (no CUDA GPU found: in Triton's interpreter)"
    rate = format_count(count / seconds)
    print(f"{counted(count, 'token')} in {seconds:.2f} s, {rate} per second{slow}", file=sys.stderr)


def _lines(file: Path) -> list[str]:
    """Return the lines of a file, or of stdin for -, that are not empty."""
    from gpt2_triton.data.prepare.contents import decode

    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        text = decode(file, 1, data)
    except OSError as error:
        wrong = f"--prompt_file: {file} cannot be read: {error.strerror}; correct the path"
        raise ConfigError(wrong) from None
    lines = [line for line in re.split("[\r\n]+", text) if line]
    if not lines:
        raise ConfigError(f"--prompt_file: {file}: no prompt; write one on each line")
    return lines
