"""A download that breaks off goes on where it stopped; only what was asked for is put in place; failure is a line."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpt2_triton.data.download import fetch
from gpt2_triton.data.progress import Progress
from gpt2_triton.errors import DataError

CONTENT = bytes(range(256)) * 40
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def server():
    """A web server on this machine; `breaks` is how many bytes an answer may have, `ranges` whether it knows them."""

    class Handler(BaseHTTPRequestHandler):
        breaks, ranges, asked = 10**9, True, []

        def do_GET(self):
            wanted = self.headers["Range"]
            Handler.asked.append(wanted)
            first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and self.ranges else 0
            if self.path != "/file" or (first and first >= len(CONTENT)):
                return self.send_error(404 if self.path != "/file" else 416)
            self.send_response(206 if first else 200)
            self.send_header("Content-Length", str(len(CONTENT) - first))
            self.end_headers()
            self.wfile.write(CONTENT[first : first + self.breaks])

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    Handler.url = f"http://127.0.0.1:{httpd.server_port}/file"
    yield Handler
    httpd.shutdown()
    httpd.server_close()
    thread.join()


@pytest.fixture
def target(tmp_path):
    return tmp_path / "cache" / "file.jsonl"


def names(target):
    return sorted(path.name for path in target.parent.iterdir())


def test_a_connection_that_breaks_is_opened_again_for_the_rest(server, target):
    server.breaks = 4000
    assert fetch(server.url, target, SHA256, "help") == target
    assert target.read_bytes() == CONTENT and names(target) == ["file.jsonl"]
    assert server.asked[-3:] == [None, "bytes=4000-", "bytes=8000-"]
    asked = len(server.asked)
    fetch(server.url, target, SHA256, "help")
    assert len(server.asked) == asked  # what is there is not asked for


@pytest.mark.parametrize("there", [1, 5000, len(CONTENT)])
def test_an_interrupted_download_goes_on(server, target, there):
    target.parent.mkdir()
    (target.parent / ".file.jsonl.part").write_bytes(CONTENT[:there])
    fetch(server.url, target, SHA256, "help")
    assert target.read_bytes() == CONTENT and server.asked[-1] == f"bytes={there}-"


def test_a_server_without_ranges_sends_all_again(server, target):
    server.ranges = False
    target.parent.mkdir()
    (target.parent / ".file.jsonl.part").write_bytes(b"x" * 3000)
    fetch(server.url, target, SHA256, "help")
    assert target.read_bytes() == CONTENT


def test_another_content_is_refused_and_forgotten(server, target):
    with pytest.raises(DataError, match=rf"/file: wrong sha256: got {SHA256}, expected {'0' * 64}; try again, or help"):
        fetch(server.url, target, "0" * 64, "help")
    assert names(target) == []


def test_a_file_that_was_spoilt_is_had_again(server, target):
    target.parent.mkdir()
    target.write_bytes(b"spoilt")
    fetch(server.url, target, SHA256, "help")
    assert target.read_bytes() == CONTENT


def test_no_network_and_no_such_file_are_one_line(server, target):
    for url, reason in ((server.url + "s", "Not Found"), ("http://127.0.0.1:1/file", "Connection refused")):
        with pytest.raises(DataError, match=rf"{url}: cannot download: got .*{reason}, expected the file; help$"):
            fetch(url, target, SHA256, "help")


def test_a_server_that_sends_nothing_more_ends_the_attempts(server, target):
    server.breaks = 0
    with pytest.raises(DataError, match="cannot download: got it broke off after 0 of 10,240 bytes"):
        fetch(server.url, target, SHA256, "help")


def test_those_who_come_together_download_once(server, target):
    threads = [threading.Thread(target=fetch, args=(server.url, target, SHA256, "help")) for _ in range(4)]
    asked = len(server.asked)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert target.read_bytes() == CONTENT and len(server.asked) == asked + 1
    assert names(target) == ["file.jsonl"]


def test_progress_is_a_line_with_rate_and_time_left(capsys, monkeypatch):
    clock = iter([0.0, 2.0, 10.0, 11.0])
    monkeypatch.setattr("gpt2_triton.data.progress.time.monotonic", lambda: next(clock))
    progress = Progress("work", 4000, "tokens")
    for _ in range(3):
        progress.advance(500)
    assert capsys.readouterr().err == "work: 1,000 of 4,000 tokens, 100 a second, 0:00:30 left\n"
