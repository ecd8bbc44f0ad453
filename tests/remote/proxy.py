"""A proxy that loses and doubles messages, as its seed says."""

import random
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx


class Faults:
    """How often each fault happened."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.counts = {"lost": 0, "unanswered": 0, "doubled": 0}


@contextmanager
def faulty_proxy(target, *, seed, share=0.3):
    faults = Faults(seed)
    upstream = httpx.Client(base_url=target, timeout=60, trust_env=False)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def forward(self, body):
            names = ("authorization", "content-type")
            headers = {name: self.headers[name] for name in names if name in self.headers}
            return upstream.request(self.command, self.path, content=body, headers=headers)

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            fault = None
            if faults.random.random() < share:
                fault = faults.random.choice(list(faults.counts))
                faults.counts[fault] += 1
            if fault != "lost":
                answer = self.forward(body)
            if fault == "doubled":
                answer = self.forward(body)
            if fault in {"lost", "unanswered"}:
                self.close_connection = True
                return
            self.send_response(answer.status_code)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", faults
    finally:
        server.shutdown()
        server.server_close()
        upstream.close()
