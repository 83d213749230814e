"""Parts of the Markdown pages: commands in fenced code, spans of inline code, links and anchors."""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
GUIDE = sorted((ROOT / "docs" / "guide").glob("*.md"))
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
RANKS = re.compile(r"--(?:nproc_per_node|ntasks-per-node) (\d+)")


class Command(NamedTuple):
    """A line of a page: its program (train, tools, benchmarks or the first
    word) and the words after it.
    """

    line: str
    program: str
    words: list[str]
    inline: bool = False  # in a sentence, where a command may stand without its arguments


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    """Return the fenced blocks with this language; commands have none."""
    return [block for found, block in FENCE.findall(text) if found == language]


def spans(text: str) -> list[str]:
    """Return inline code."""
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", FENCE.sub("", text))


def commands(text: str) -> list[Command]:
    """Return the commands in a page's blocks without a language, and those in inline
    code that start a program.
    """
    lines = [line for block in blocks(text, "") for line in block.replace("\\\n", " ").splitlines()]
    found = [
        command_of(line)
        for line in (re.split(r"(?:^|\s+)# ", line)[0].strip() for line in lines)
        if line
    ]
    inline = re.compile(r"(gpt2-triton|python -m (gpt2_triton|benchmarks)|python train.py) [\w./]+")
    return found + [
        command_of(span)._replace(inline=True) for span in spans(text) if inline.match(span)
    ]


def command_of(line: str) -> Command:
    """Split a line without its pipe.  A training gets --gpus with the number of ranks
    that its launcher starts.
    """
    program, *rest = words = shlex.split(re.split(r" [|>] ", line)[0])
    launched = ["--gpus", found[1]] if (found := RANKS.search(line)) else []
    for name in ("gpt2_triton", "benchmarks", "train.py"):
        if name in words and (words[words.index(name) - 1] in ("-m", "python") or launched):
            program, rest = name, words[words.index(name) + 1 :]
    if script := re.fullmatch(r"python eval/(\w+)\.py", " ".join(words[:2])):
        program, rest = "gpt2_triton", [script[1], *words[2:]]
    if program in ("gpt2_triton", "gpt2-triton"):
        program, rest = ("train.py", rest[1:]) if rest[0] == "train" else ("tools", rest)
    return (
        Command(line, "train", [*rest, *launched])
        if program == "train.py"
        else Command(line, program, rest)
    )


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text))


def anchors(text: str) -> set[str]:
    """Return the anchors of headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    kept = (re.sub(r"[^\w\- ]", "", heading.strip().lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in kept}
