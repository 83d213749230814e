"""Command `sample`: print texts that a model writes."""

from pathlib import Path

from gpt2_triton.commands.app import require_at_least, select_device
from gpt2_triton.errors import ConfigError


def sample(
    checkpoint: Path,
    /,
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 42,
    num: int = 1,
    batch: int = 64,
) -> None:
    """Print texts that a model writes.

    Parameters
    ----------
    checkpoint: Path
        A run, one of its step directories, or hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE.
    prompt: str
        Text to continue; empty starts at the end-of-text token.
    tokens: int
        Number of tokens to sample for each text.
    temperature: float
        Softmax temperature; 0 takes the most likely token.
    top_k: int
        Sample among the k most likely tokens; 0 among all.
    top_p: float
        Sample among the most likely tokens that together have probability p (of those that top_k keeps); 1 among all.
    seed: int
        Seed of the first text; each next text adds 1.
    num: int
        Number of texts; a single one is printed while it is decoded, several one after the other.
    batch: int
        Largest number of texts decoded at once; it changes the speed, not the random numbers of a text.
    """
    require_at_least(
        tokens=(tokens, 1),
        temperature=(temperature, 0),
        top_k=(top_k, 0),
        seed=(seed, 0),
        num=(num, 1),
        batch=(batch, 1),
    )
    if not 0 < top_p <= 1:
        raise ConfigError(f"--top_p: must be above 0 and at most 1, got {top_p}; 1 keeps every token")
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise ConfigError("--prompt: not UTF-8; give it in the encoding of the terminal's locale") from None
    select_device()
    from gpt2_triton.inference import sample as sampling

    sampling.sample_text(checkpoint, prompt, tokens, temperature, top_k, top_p, seed, num, batch)
