"""The comparison of tokens with transformers'."""

import pytest

from benchmarks.accuracy import tokenizers
from tests.support.tokenizer_files import byte_level


@pytest.mark.slow
def test_differences_are_counted_by_text(tmp_path):
    pytest.importorskip("transformers")
    folder = byte_level(tmp_path / "tok")
    assert not any(tokenizers.differences(str(folder), folder).values())
    found = tokenizers.differences("bytes", folder)
    assert found["tokens"] == found["ordinary"] == found["text"] == tokenizers.TEXTS
