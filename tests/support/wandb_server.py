"""A server on localhost with the parts of Weights & Biases' protocol that a run uses."""

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WandbServer(ThreadingHTTPServer):
    """Holds one run: history `rows`, `config`, ids `names` it was opened with."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.rows, self.config, self.names = [], {}, []
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):  # wandb closes connections early
        pass

    def graphql(self, query: str, variables: dict) -> dict:
        project = {"name": "p", "entity": {"name": "me"}}
        if "RunResumeStatus" in query:
            bucket = self.rows and {
                "name": variables["name"], "config": "{}", "wandbConfig": '{"t": 1}',
                "summaryMetrics": "{}", "logLineCount": 0,
                "historyTail": json.dumps(self.rows[-1:]), "historyLineCount": len(self.rows),
                "eventsTail": "[]", "eventsLineCount": 0,
            }  # fmt: skip
            return {"model": project | {"bucket": bucket or None}}
        if "upsertBucket" in query:
            self.config |= json.loads(variables["config"] or "{}")
            self.names.append(variables["name"])
            bucket = {"id": "3", "name": variables["name"], "project": project}
            return {"upsertBucket": {"inserted": not self.rows, "bucket": bucket}}
        if "CreateRunFiles" in query:
            files = [
                {"name": name, "uploadUrl": f"{self.url}/up/{name}"} for name in variables["files"]
            ]
            return {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}
        return {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        answer = {}
        if self.path == "/graphql":
            request = json.loads(body)
            answer = {"data": self.server.graphql(request["query"], request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            history = json.loads(body).get("files", {}).get("wandb-history.jsonl")
            if history:
                self.server.rows[history["offset"] :] = history["content"]
        text = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_PUT = do_POST

    def log_message(self, *args):
        pass
