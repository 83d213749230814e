"""Console notes on fp8 tensors that saturate in several records of tensor statistics in a row."""

from typing import Any

from gpt2_triton.model.fp8 import HEAD_SCALES, OPERATION_OF
from gpt2_triton.model.tensor_stats import fp8_name

SHARE = 1e-4  # of a tensor's elements
RECORDS = 3  # one after the other


class SaturationWatch:
    """Counts for each fp8 tensor the records in a row in which more than SHARE of it was saturated."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, int], int] = {}

    def notes(self, record: dict[str, Any]) -> list[str]:
        """Return a line for each tensor whose number of such records in a row has just reached RECORDS."""
        lines = []
        for name, columns in record.get("fp8", {}).items():
            for i, share in enumerate(columns["saturated"]):
                n = self._records.get((name, i), 0) + 1 if share is not None and share > SHARE else 0
                self._records[name, i] = n
                if n == RECORDS:
                    lines.append(_note(name, i, share))
        return lines


def _note(name: str, i: int, share: float) -> str:
    keep = "head" if name in HEAD_SCALES else f"{OPERATION_OF[name]}:{i}"
    often = f"above {SHARE:.2%} in {RECORDS} records of statistics in a row"
    what = f"{share:.2%} of {fp8_name(name, i)} saturated, {often}"
    return f"fp8: {what}: its largest values are cut off; if the loss suffers, add {keep} to fp8.keep_bf16"
