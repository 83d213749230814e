"""HellaSwag's file is downloaded whole or not at all; a failure is one line.  tests/inference tests its questions."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpt2_triton.data import hellaswag
from gpt2_triton.errors import DataError

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def server(monkeypatch):
    """A web server on this machine, which hellaswag.URL names; it sends `sent` bytes of `content`."""

    class Handler(BaseHTTPRequestHandler):
        content, sent, requests = CONTENT, None, []

        def do_GET(self):
            Handler.requests.append(self.path)
            if self.path != "/file":
                return self.send_error(404)
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.content)))
            self.end_headers()
            self.wfile.write(self.content[: self.sent])

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(hellaswag, "URL", f"http://127.0.0.1:{httpd.server_port}/file")
    monkeypatch.setattr(hellaswag, "SHA256", hashlib.sha256(CONTENT).hexdigest())
    yield Handler
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path / hellaswag.CACHED


def names(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_download_happens_once(server, target):
    for _ in range(2):
        hellaswag.downloaded()
        assert target.read_bytes() == CONTENT and names(target) == [target.name]
    assert len(server.requests) == 1


@pytest.mark.parametrize("sent", [0, 4000])
def test_download_cut_short_leaves_no_file(server, target, sent):
    server.sent = sent
    with pytest.raises(DataError, match=rf"/file: cannot download: .*{sent} bytes.*; try again; else get it with"):
        hellaswag.downloaded()
    assert names(target) == []


def test_download_with_wrong_sha256_leaves_no_file(server, target):
    server.content = CONTENT[::-1]
    found, expected = hashlib.sha256(server.content).hexdigest(), hellaswag.SHA256
    with pytest.raises(DataError, match=f"/file: wrong sha256 {found}, expected {expected}; try again"):
        hellaswag.downloaded()
    assert names(target) == []


def test_download_replaces_a_damaged_file(server, target):
    target.parent.mkdir(parents=True)
    target.write_bytes(b"damaged")
    hellaswag.downloaded()
    assert target.read_bytes() == CONTENT


def test_download_failure_is_one_line(server, target, monkeypatch):
    for url, reason in ((hellaswag.URL + "s", "Not Found"), ("http://127.0.0.1:1/file", "Connection refused")):
        monkeypatch.setattr(hellaswag, "URL", url)
        with pytest.raises(DataError, match=rf"{re.escape(url)}: cannot download: .*{reason}; try again"):
            hellaswag.downloaded()
