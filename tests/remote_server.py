"""A server of OpenAI's API in a few lines, with the traps of real ones: a test writes what it says, byte by byte where it matters.

``script``: for each POST the next entry (the last one again and again): a list of bytes (pieces of an event stream), a dict (a JSON
answer), an int (a status) or a function of the handler that does all by itself.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}


def chunk(text: str | None = None, *, index: int = 0, finish: str | None = None, chat: bool = True, **more: Any) -> bytes:
    delta = ({"delta": {} if text is None else {"content": text}} if chat else {"text": text or ""})
    return event({"choices": [{"index": index, **delta, "finish_reason": finish, **more}]})


def event(data: Any) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def counted(**usage: int) -> bytes:
    return event({"choices": [], "usage": USAGE | usage})


def answer(*texts: str, chat: bool = True, finish: str = "stop", **usage: int) -> list[bytes]:
    """A whole answer as servers stream it."""
    first = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}) if chat else b""
    return [first, *(chunk(text, chat=chat) for text in texts), chunk(finish=finish, chat=chat), counted(**usage), DONE]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def do_GET(self) -> None:
        self.server.seen.append(("GET", self.path, dict(self.headers), None))
        if isinstance(self.server.models, int):
            return self.fail(self.server.models)
        self.json({"object": "list", "data": [{"id": name, "owned_by": self.server.owner, **self.server.facts} for name in self.server.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.seen.append(("POST", self.path, dict(self.headers), body))
        script = self.server.script
        said = script.pop(0) if len(script) > 1 else script[0]
        if callable(said):
            said(self)
        elif isinstance(said, int):
            self.fail(said)
        elif isinstance(said, dict):
            self.json(said)
        else:
            self.stream(said)

    def fail(self, status: int, text: str = '{"error": {"message": "no such thing"}}', **headers: str) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(text.encode())))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(text.encode())

    def json(self, data: Any) -> None:
        raw = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def begin(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream; charset=utf-8")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def piece(self, raw: bytes) -> None:
        if raw:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(raw), raw))
            self.wfile.flush()

    def stream(self, pieces: list[bytes], pause: float = 0.0) -> None:
        self.begin()
        for raw in pieces:
            self.piece(raw)
            time.sleep(pause)
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args: Any) -> None:
        pass


class Server(ThreadingHTTPServer):
    """``seen``: (method, path, headers, body) of every request. ``left``: set when a client hung up on `endless`."""

    daemon_threads = True

    def __init__(self, *script: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: list[Any] = list(script) or [answer("Hello", " there")]
        self.models: list[str] | int = ["far"]
        self.owner, self.facts = "vllm", {}
        self.seen: list[tuple[str, str, dict[str, str], Any]] = []
        self.left = threading.Event()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def asked(self) -> list[Any]:
        return [body for method, _, _, body in self.seen if method == "POST"]

    def handle_error(self, request: Any, client_address: Any) -> None:
        self.left.set()                     # a broken pipe: the client went away

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def endless(handler: Handler) -> None:
    """One token every ten milliseconds until the client has had enough."""
    handler.begin()
    for number in range(3000):
        handler.piece(chunk(f"{number} "))
        time.sleep(0.01)


def then(*acts: Callable[[Handler], Any]) -> Callable[[Handler], None]:
    def run(handler: Handler) -> None:
        for act in acts:
            act(handler)
    return run
