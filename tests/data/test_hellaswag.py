"""HellaSwag's file is downloaded whole or not at all; a failure is one line.
tests/inference tests its questions.
"""

import hashlib
import io
import tempfile
import urllib.request
from http.client import IncompleteRead
from urllib.error import URLError

import pytest

from gpt2_triton.data import hellaswag
from gpt2_triton.errors import DataError

CONTENT = bytes(range(256)) * 40


class Cut(io.BytesIO):
    """A response that ends early."""

    def read(self):
        raise IncompleteRead(b"", 4000)


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """The responses to the next downloads, of which an error is raised;
    the cache is in tmp_path.
    """
    found = []

    def urlopen(url, timeout):
        if isinstance(found[0], Exception):
            raise found.pop(0)
        return found.pop(0)

    monkeypatch.setattr(urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


@pytest.mark.parametrize("home", [True, False])
def test_download_happens_once_and_replaces_a_damaged_file(answers, tmp_path, monkeypatch, home):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not home:  # as a container's user may be
        monkeypatch.delenv("HOME")
    target = tmp_path / hellaswag.CACHED
    target.parent.mkdir(parents=True)
    target.write_bytes(b"damaged")
    answers += [io.BytesIO(CONTENT)]
    for _ in range(2):
        assert hellaswag.downloaded() == target and target.read_bytes() == CONTENT
        assert [*target.parent.iterdir()] == [target] and not answers


@pytest.mark.parametrize(("answer", "message"), [
    (Cut(), "cannot download: .*4000 more expected"),
    (URLError("Name or service not known"), "cannot download: Name or service not known"),
    (io.BytesIO(CONTENT[::-1]), "wrong sha256 .*, expected "),
])  # fmt: skip
def test_failed_download_is_one_line_and_leaves_no_file(answers, tmp_path, answer, message):
    answers.append(answer)
    with pytest.raises(
        DataError, match=f"^{hellaswag.URL}: {message}.*; try again; else get it with"
    ):
        hellaswag.load_questions(None, None, 0, ())
    assert [*(tmp_path / hellaswag.CACHED).parent.iterdir()] == []
