"""A server in this process with two routes of the Hugging Face Hub: what a
repository holds, and its files.
"""

import hashlib
import http.server
import json

NOBODY = "http://127.0.0.1:9"  # no server listens there


class Hub(http.server.BaseHTTPRequestHandler):
    files: dict[str, bytes] = {}
    commit, gets, broken = "c" * 40, [], False

    def do_GET(self):
        if self.path.startswith("/api/datasets/kjj0/fineweb10B-gpt2"):
            rows = [
                {
                    "rfilename": name,
                    "size": (n := len(data)),
                    "lfs": {"sha256": _sha(data), "size": n, "pointerSize": 9},
                }
                for name, data in self.files.items()
            ]
            commit = "b" * 40 if "/revision/branch" in self.path else self.commit
            body = json.dumps(
                {"id": "kjj0/fineweb10B-gpt2", "sha": commit, "siblings": rows}
            ).encode()
            return self._answer(200, body, {"Content-Type": "application/json"})
        name = self.path.rpartition("/")[2]
        data = (
            self.files.get(name)
            if f"/kjj0/fineweb10B-gpt2/resolve/{self.commit}/" in self.path
            else None
        )
        if data is None:
            return self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        if self.command == "GET":
            self.gets.append(name)
        sent = data[:-1] + b"?" if self.broken else data
        self._answer(200, sent, {"ETag": f'"{_sha(data)}"', "X-Repo-Commit": self.commit})

    do_HEAD = do_GET

    def _answer(self, code, body, headers):
        self.send_response(code)
        for key, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments):
        pass


def _sha(data):
    return hashlib.sha256(data).hexdigest()
