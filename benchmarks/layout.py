"""Tables of text: Markdown, or aligned for a terminal."""

from collections.abc import Collection, Sequence


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def aligned(lines: Sequence[Sequence[str]], left: Collection[int] = ()) -> str:
    """Return lines of equally many cells in columns; those of `left` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in lines
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)
