"""`sample`: print texts that a model writes."""

from pathlib import Path

from gpt2_triton.cli import choose_device, require_least


def sample(
    checkpoint: Path,
    /,
    *,
    prompt: str = "",
    tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 42,
    num: int = 1,
) -> None:
    """Print texts that a model writes.

    Parameters
    ----------
    checkpoint: Path
        A run, one of its step directories, or hf:DIR_OR_NAME, llmc:FILE or nanogpt:FILE.
    prompt: str
        Text to continue; empty starts at the end-of-text token.
    tokens: int
        Tokens of each text.
    temperature: float
        Softmax temperature of the draw; 0 takes the most likely token.
    top_k: int
        Draw among the k most likely tokens; 0 among all.
    seed: int
        Seed of the first text; the next ones count on.
    num: int
        Texts to write.
    """
    require_least(tokens=(tokens, 1), temperature=(temperature, 0), top_k=(top_k, 0), seed=(seed, 0), num=(num, 1))
    choose_device()
    from gpt2_triton import sample as sampling

    sampling.sample_text(checkpoint, prompt, tokens, temperature, top_k, seed, num)
