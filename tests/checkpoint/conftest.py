"""Fixtures of the tests of checkpoints."""

import pytest

from tests.support.checkpoints import write


@pytest.fixture
def newest(tmp_path):
    """The newest checkpoint, of step 20, of a run that has another of step 10."""
    write(tmp_path / "checkpoints", 10)
    return write(tmp_path / "checkpoints", 20)
