"""One statement does one thing: no packed assignment, and no name or effect
hidden inside another expression.

Refused, as far as the syntax tells:

    a, b, c = 1, 2, 3         a tuple display assigned to three or more names
    f(x := y)                 a walrus inside a call
    if x := g():              a walrus that takes a call's result, inside a condition
    if queue.pop():           a call named by a verb of VERBS, inside a condition
    x and f()                 a condition as a statement

`while x := g()` is free, since nothing else reads on, and so is a walrus in a comprehension.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [
    file
    for top in ("gpt2_triton", "benchmarks", "eval")
    for file in sorted((ROOT / top).rglob("*.py"))
]
VERBS = set(
    "acquire add append appendleft begin clear close discard end extend "
    "finish insert kill launch mkdir next pop "
    "popleft popitem put read recv remove rename rmdir run save send "
    "setdefault start stop step unlink update wait "
    "write writelines".split()
)
OWN_SCOPES = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
TRITON = {"tl", "gl"}  # what they load has no effect


def within(node: ast.AST) -> Iterator[ast.AST]:
    """Yield an expression and its parts, without those of comprehensions and lambdas."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, OWN_SCOPES):
            yield from within(child)


def is_call_of_a_verb(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        is_triton = isinstance(called.value, ast.Name) and called.value.id in TRITON
        return not is_triton and first_word(called.attr) in VERBS
    return isinstance(called, ast.Name) and first_word(called.id) in VERBS


def first_word(name: str) -> str:
    return name.lstrip("_").partition("_")[0]


def takes_a_result(node: ast.AST) -> bool:
    """Return whether a node is a walrus that names what a call returns."""
    return isinstance(node, ast.NamedExpr) and any(
        isinstance(inner, ast.Call) for inner in within(node.value)
    )


def is_offence(node: ast.AST) -> bool:
    """Return whether one of the rules refuses a node."""
    match node:
        case ast.Assign(value=ast.Tuple()):
            return any(
                isinstance(target, ast.Tuple) and len(target.elts) > 2 for target in node.targets
            )
        case ast.Call():
            return any(isinstance(inner, ast.NamedExpr) for inner in within(node))
        case ast.If() | ast.IfExp():
            return any(
                is_call_of_a_verb(inner) or takes_a_result(inner) for inner in within(node.test)
            )
        case ast.Expr():
            return isinstance(node.value, (ast.BoolOp, ast.IfExp))
    return False


def offences(source: str) -> list[int]:
    """Return the line of each offence."""
    return [node.lineno for node in ast.walk(ast.parse(source)) if is_offence(node)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_one_statement_does_one_thing(file):
    found = offences(file.read_text())
    assert not found, f"lines {found}: give each step a name and a line"


REFUSED = [
    "a, b, c = 1, 2, 3",
    "self.a, (b, c), d = f(), g(), 4",
    "f(x := 1)",
    "if f(x := y): pass",
    "if (x := f()): pass",
    "if a and not (x := f(y)): pass",
    "y = 1 if (x := f()) else 2",
    "if queue.pop(): pass",
    "if a and self._read_step(1): pass",
    "y = a if next(b) else c",
    "x and f()",
    "f() if x else g()",
]
FREE = [
    "a, b = 1, 2",
    "a, b, c = f()",
    "for a, b, c in rows: pass",
    "while part := file.read(4): pass",
    "f([m[1] for name in names if (m := match(name))])",
    "if (x := y) > 1: pass",
    "if is_due(step) or text.startswith('x'): pass",
    "if tl.load(pointer) == 0: pass",
]


@pytest.mark.parametrize("source", REFUSED)
def test_each_rule_refuses(source):
    assert offences(source)


@pytest.mark.parametrize("source", FREE)
def test_no_rule_refuses(source):
    assert not offences(source)
