"""Docstrings, comments, messages and pages avoid a short list of patterns that are not plain technical English."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [
    path.relative_to(ROOT)
    for top in ("gpt2_triton", "benchmarks", "eval", "tests")
    for path in sorted((ROOT / top).rglob("*.py"))
] + [Path("train.py"), Path("hatch_build.py")]
PAGES = [path.relative_to(ROOT) for path in (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")))]

# a first line that is a question, or a clause that has no verb of its own
CLAUSE = re.compile(r"(What|Who|Whom|Whose|Whether|Where|Of|How|Why|Is|Are|Does|Do|Has|Have|Can)\b(?! not\b)")
# a function's first line says what a call does; these begin a noun phrase
NOUN_PHRASE = re.compile(r"(The|A|An|This|That|These|Those|Its|Their|All|Each|Every|One|Two|Some|Any|Both|No|None)\b")
WORDS = [
    r"go(es|ing)? on\b(?! (a|the|one|any|every|each|several|disk|stderr|stdout|GPU|CPU))|went on\b",
    r"anew",
    r"by heart",
    r"whoever",
    r"besides",
    r"muster",
    r"crew",
    r"(speaks?|hears?|is heard)",
    r"(asks?|tells?) (it|them)\b",
    r"(ranks?|hosts?|nodes?|files?|kernels?|tests?|GPUs?|devices?|runs?|steps?|tables?|threads?) "
    r"(say|says|tell|tells|know|knows|ask|asks|meet|meets|hear|learn|learns|want|wants)",
]
BANNED = re.compile(r"\b(" + "|".join(WORDS) + r")\b", re.IGNORECASE)


def docstrings(tree: ast.AST) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield node, text


def is_property(node: ast.AST) -> bool:
    decorators = getattr(node, "decorator_list", [])
    return any("property" in ast.unparse(decorator) for decorator in decorators)


def wrong_first_lines(source: str, is_test: bool) -> Iterator[str]:
    for node, text in docstrings(ast.parse(source)):
        first, name = text.splitlines()[0], getattr(node, "name", "module")
        if first.rstrip().endswith("?") or CLAUSE.match(first):
            yield f"{name}: a question, or a clause without a verb: {first}"
        elif isinstance(node, ast.FunctionDef) and not is_test and not is_property(node) and NOUN_PHRASE.match(first):
            yield f"{name}: no verb that says what a call does: {first}"


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every comment and string."""
    kinds = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in kinds:
            yield token.start[0], " ".join(token.string.split())


def banned(parts: Iterator[tuple[int, str]]) -> list[str]:
    return [f"{line}: {found[0]!r}: {text[:100]}" for line, text in parts if (found := BANNED.search(text))]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_docstrings_begin_with_what_the_thing_does_or_is(path):
    assert not list(wrong_first_lines((ROOT / path).read_text(), path.parts[0] == "tests"))


@pytest.mark.parametrize("path", [path for path in SOURCES if path.name != "test_english.py"], ids=str)
def test_comments_and_strings_avoid_the_listed_words(path):
    assert not banned(prose((ROOT / path).read_text()))


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_pages_avoid_the_listed_words(path):
    assert not banned(enumerate((ROOT / path).read_text().splitlines(), start=1))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('"""What ranks exchange in a step."""', "module: a question"),
        ('def f():\n    """Does a checkpoint belong to this run?"""', "f: a question"),
        ('def f():\n    """The sums of these buckets."""', "f: no verb"),
        ('"""Publish the heartbeat."""\ndef f():\n    """Return the sums."""', None),
        ('class A:\n    """A buffer with its sizes."""', None),
        ('class A:\n    @property\n    def f(self):\n        """The number of parameters."""', None),
    ],
)
def test_first_lines_are_judged(source, found):
    assert [message.startswith(found) for message in wrong_first_lines(source, False)] == ([True] if found else [])


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("x = 1  # the run goes on", 1),
        ("x = 'a rank speaks'", 1),
        ("x = f'rank {1} computes anew'", 1),
        ("goes_on = 1  # continues", 0),
        ("# whether it goes on the GPU", 0),
    ],
)
def test_words_are_found(source, count):
    assert len(banned(prose(source))) == count
