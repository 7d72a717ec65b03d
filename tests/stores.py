"""An object store of the S3 protocol in a process of its own, and a proxy before it that makes faults."""

from __future__ import annotations

import http.client
import re
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_START_S = 60.0  # moto loads much
_HOP = {"connection", "transfer-encoding", "content-length", "keep-alive", "date", "server"}
_KEY = re.compile(r"Credential=([^/]+)/")


@dataclass(frozen=True)
class Fault:
    """What happens to one request instead of, or before, its answer.

    Attributes:
        status: Answer with this, and do not ask the store; 0: break the connection.
        body: The answer's.
        delay_s: Wait so long first.
    """

    status: int | None = None
    body: str = ""
    delay_s: float = 0.0


def refused(code: str, message: str, status: int = 403) -> Fault:
    """What S3 answers where it does not serve a request."""
    return Fault(status, f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>")


RESET = Fault(0)
SLOW_DOWN = refused("SlowDown", "Please reduce your request rate.", 503)
BROKEN = refused("InternalError", "We encountered an internal error. Please try again.", 500)


@dataclass
class Seen:
    """A request that came to the proxy."""

    method: str
    path: str
    key: str  # the access key it was signed with


@dataclass(eq=False)
class Store:
    """A running store. ``fault`` is asked for every request; None lets it through.

    Attributes:
        url: Of the proxy.
        requests: Those that came, oldest first.
        faults: How many of them met a fault.
    """

    url: str
    behind: tuple[str, int]
    fault: Callable[[Seen], Fault | None] = lambda _: None
    requests: list[Seen] = field(default_factory=list)
    faults: int = 0

    def options(self, key: str = "access-key-id", secret: str = "some-secret-key", **more: str) -> dict[str, str]:
        """Storage options that lead to the proxy. The client's own retries are short: the tests are about ours."""
        return {
            "aws_endpoint": self.url,
            "allow_http": "true",
            "aws_region": "us-east-1",
            "aws_access_key_id": key,
            "aws_secret_access_key": secret,
            "client_max_retries": "1",
            "client_retry_timeout": "2",
            **more,
        }

    def make_bucket(self, name: str) -> None:
        """Makes a bucket, not through the proxy."""
        host, port = self.behind
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/{name}", method="PUT")).close()


@contextmanager
def store() -> Iterator[Store]:
    """Runs a store until the end of the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    server = None
    try:
        _wait_for(port, process)
        server = _Proxy(("127.0.0.1", 0), _Handler)
        server.store = Store(f"http://127.0.0.1:{server.server_address[1]}", ("127.0.0.1", port))
        threading.Thread(target=server.serve_forever, name="faulty-store", daemon=True).start()
        yield server.store
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
        process.terminate()
        process.wait()


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline, "the store does not start"
            time.sleep(0.05)


class _Proxy(ThreadingHTTPServer):
    daemon_threads = True
    store: Store

    def handle_error(self, request: object, client_address: object) -> None:
        """Says nothing: clients leave when they are killed."""


class _Handler(BaseHTTPRequestHandler):
    server: _Proxy
    protocol_version = "HTTP/1.1"

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = _KEY.search(self.headers.get("Authorization", ""))
        seen = Seen(self.command, self.path, found.group(1) if found else "")
        store = self.server.store
        store.requests.append(seen)
        fault = store.fault(seen)
        if fault is not None:
            store.faults += 1
            time.sleep(fault.delay_s)
            if fault.status == 0:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)  # RST, not FIN
                self.connection.close()
                self.close_connection = True
                return
            if fault.status is not None:
                self._answer(fault.status, {"Content-Type": "application/xml"}, fault.body.encode())
                return
        behind = http.client.HTTPConnection(*store.behind, timeout=60)
        behind.request(self.command, self.path, body, dict(self.headers.items()))
        answer = behind.getresponse()
        data = answer.read()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _HOP}
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self._answer(answer.status, kept, data, length)
        behind.close()

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: str | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", length if length is not None else str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: tests look at ``requests``."""
