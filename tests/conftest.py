"""Shared by all tests: the interpreter when there is no GPU, NaN-filled
outputs, one error measure.
"""

import os
import re
from pathlib import Path

# the interpreter's arrays are small: two threads take three times as long
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before any kernel is decorated

    from tests.support import interpreter

    interpreter.prepare()

import pytest  # noqa: E402
import triton  # noqa: E402

LONGEST = ("test_quickstart.py", "test_hopper.py", "test_wide_accesses.py")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pytest_addoption(parser):
    parser.addoption(
        "--precision",
        choices=["fp32", "fp8"],
        default="fp32",
        help="of tiny_config, unless a test sets it",
    )
    parser.addoption(
        "--named-in",
        type=Path,
        metavar="PAGE",
        help="only tests that this page names, as `training/test_x.py::name`",
    )


def pytest_report_header():
    return f"torch {torch.__version__}, triton {triton.__version__}"


def pytest_configure(config):
    if config.getoption("precision") == "fp8":
        from tests.support import tiny

        tiny.DEFAULT_NUMBERS = {"dtype": "bf16", "precision": "fp8"}


def pytest_collection_modifyitems(config, items):
    """Skip tests of a GPU without one; put the longest tests first, so that none ends
    after all others.
    """
    if page := config.getoption("named_in"):
        named = set(re.findall(r"`([\w/]+\.py)::(\w+)`", page.read_text(encoding="utf-8")))
        chosen = {True: [], False: []}
        for item in items:
            place = item.path.relative_to(Path(__file__).parent).as_posix()
            chosen[(place, item.originalname.removeprefix("test_")) in named].append(item)
        if not chosen[True]:
            raise pytest.UsageError(
                f"--named-in: {page} names none of the tests, as `training/test_x.py::name`"
            )
        config.hook.pytest_deselected(items=chosen[False])
        items[:] = chosen[True]
    items.sort(key=lambda item: item.path.name not in LONGEST)
    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a CUDA GPU")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)


@pytest.fixture
def rng():
    """randn(*shape, dtype): reproducible normal numbers on the test device."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape, dtype=torch.float32):
        return torch.randn(*shape, generator=generator).to(DEVICE, dtype)

    randn.generator = generator
    return randn
