"""Prints docs/guide/config.md, made from gpt2_triton/config/schema.py:
`python docs/config_table.py`.
"""

from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from gpt2_triton.config.schema import may_change_on_resume, options

HEAD = """# The configuration

Give a key as `--section.key value` on the command line, \
or in YAML below its section ([an example](training.md#a-file-of-your-own)).
The defaults are llm.c's recipe `gpt2_124m`, but print no samples, ask no HellaSwag \
and keep only the newest checkpoints.
A resume may change `free` keys, and refuses another value of a `kept` key: \
that would be a new run. No number is negative. `python docs/config_table.py` prints this page.
"""
LIMITS = {
    "ge": "at least {}",
    "gt": "above {}",
    "le": "at most {}",
    "lt": "below {}",
    "multiple_of": "multiple of {}",
}
FAR = 1 << 20


def table() -> str:
    """Return the whole page: a heading and a table for each section, in the
    order of the declarations.
    """
    lines, section = [HEAD], None
    for key, field in options():
        group = key.rpartition(".")[0] or key
        if group != section:
            section = group
            lines += [
                f"## {section}",
                "",
                "| key | type | default | on resume | meaning |",
                "|---|---|---|---|---|",
                "",
            ]
        resumed = "free" if may_change_on_resume(key) else "kept"
        row = [
            f"`{key}`",
            _type(field),
            f"`{_yaml(field.default)}`",
            resumed,
            field.description or "",
        ]
        lines.insert(-1, "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines)


def _type(field: FieldInfo) -> str:
    """Return the type and its limits, without those that no user meets: far and negative ones."""
    found = [
        (name, getattr(rule, name))
        for rule in field.metadata
        for name in LIMITS
        if hasattr(rule, name)
    ]
    met = [(name, value) for name, value in found if value < FAR and (name, value) != ("ge", 0)]
    return ", ".join([_name(field.annotation), *(LIMITS[name].format(f"{v:g}") for name, v in met)])


def _name(annotation: Any) -> str:
    """Return the type as a user writes it: int or `null`, or the words of a choice."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _name(inner[0])
    if origin in (Union, UnionType):
        return " or ".join(map(_name, inner))
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in inner)
    return {type(None): "`null`", str: "text"}.get(
        annotation, getattr(annotation, "__name__", str(annotation))
    )


def _yaml(value: Any) -> str:
    return (
        yaml.safe_dump(value).partition("\n")[0]
        if not isinstance(value, str) or not value
        else value
    )


if __name__ == "__main__":
    print(table(), end="")
