"""The Hub of the tests of this folder."""

import http.server
import threading

import numpy as np
import pytest

from gpt2_triton.data.shards import write_shard
from tests.data.prepare.hub_server import Hub


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    for i in range(4):
        name = f"fineweb_{'train' if i else 'val'}_{i:06d}.bin"
        write_shard(tmp_path / "x.bin", np.arange(i, 500 + i, dtype=np.uint16))
        monkeypatch.setitem(Hub.files, name, (tmp_path / "x.bin").read_bytes())
    (tmp_path / "x.bin").unlink()
    Hub.files["README.md"] = b"# Tokens"
    monkeypatch.setattr(Hub, "gets", [])
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    yield Hub
    server.shutdown()
    server.server_close()
