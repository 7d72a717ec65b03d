"""A small server of LanceDB's remote protocol, for tests: real clients talk to it over HTTP, real tables answer.

It knows what reading needs: describe, list the versions, count, explain and query. As a query over several machines
may, it gives the rows of a query in an order of its own: the reverse of the table's.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
from lance.schema import schema_to_json

MOST_ROWS = 1 << 62  # how a client says "all rows"


class Refusal(Exception):
    """An answer that is an error: status and text."""


class RemoteServer(ThreadingHTTPServer):
    """Serves one local database.

    Attributes:
        requests: (operation, body) of each request that was let in.
        broken: What to answer to queries instead, if anything: status and text.
    """

    daemon_threads = True

    def __init__(self, path: str, api_key: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.api_key = api_key
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.broken: tuple[int, str] | None = None
        self._database = lancedb.connect(path)

    @property
    def url(self) -> str:
        """For ``host_override``."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, name: str, operation: str, body: dict[str, Any]) -> bytes:
        """Returns JSON, or for a query an Arrow IPC file.

        Raises:
            Refusal: No such table, version or operation, or a query that cannot be read.
        """
        self.requests.append((operation, body))
        try:
            table = self._database.open_table(name)
            if body.get("version") is not None:
                table.checkout(body["version"])
        except ValueError as error:
            raise Refusal(404, str(error)) from error
        if self.broken is not None and operation == "query":
            raise Refusal(*self.broken)
        try:
            if operation == "query":
                return _as_file(_query(table, body).to_arrow())
            return json.dumps(self._facts(table, operation, body)).encode()
        except (ValueError, RuntimeError) as error:
            raise Refusal(400, str(error)) from error

    @staticmethod
    def _facts(table: Any, operation: str, body: dict[str, Any]) -> Any:
        if operation == "describe":
            return {"version": table.version, "schema": schema_to_json(table.schema), "location": table.uri}
        if operation == "version/list":
            return {"versions": [v | {"timestamp": f"{v['timestamp'].isoformat()}Z"} for v in table.list_versions()]}
        if operation == "count_rows":
            return table.count_rows(body.get("predicate"))
        if operation == "explain_plan":
            return _query(table, body["query"]).explain_plan(body["verbose"])
        if operation == "get_lsm_write_spec":
            return {"lsm_write_spec": None}
        raise Refusal(404, f"{operation} is not served here")


@contextmanager
def serving(path: str, api_key: str) -> Iterator[RemoteServer]:
    """Serves a local database until the end of the block."""
    server = RemoteServer(path, api_key)
    thread = threading.Thread(target=server.serve_forever, name="remote-server")
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: RemoteServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        version, kind, name, *operation = self.path.split("?")[0].strip("/").split("/")
        try:
            if self.headers.get("x-api-key") != self.server.api_key:
                raise Refusal(401, f"no such key: {self.headers.get('x-api-key')}")
            assert (version, kind) == ("v1", "table")
            answer = self.server.answer(name, "/".join(operation), json.loads(text) if text else {})
            status, is_arrow = 200, operation == ["query"]
        except Refusal as refusal:
            status, answer, is_arrow = refusal.args[0], refusal.args[1].encode(), False
        self.send_response(status)
        self.send_header("Content-Type", "application/vnd.apache.arrow.file" if is_arrow else "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing: tests look at ``requests``."""


def _query(table: Any, body: dict[str, Any]) -> Any:
    query = table.search()
    if body.get("filter"):
        query = query.where(body["filter"], prefilter=body.get("prefilter", True))
    if body.get("columns") is not None:
        query = query.select(body["columns"])
    if body.get("with_row_id"):
        query = query.with_row_id(True)
    if body.get("offset"):
        query = query.offset(body["offset"])
    return query if body["k"] > MOST_ROWS else query.limit(body["k"])


def _as_file(rows: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, rows.schema) as file:
        file.write_table(rows.take(np.arange(rows.num_rows)[::-1]))
    return bytes(sink.getvalue())


def open_remote(url: str, api_key: str, name: str) -> Any:
    """Opens a table as users do, without trying again where the server fails."""
    retries = {"retries": 0, "connect_retries": 0, "read_retries": 0}
    database = lancedb.connect("db://base", api_key=api_key, host_override=url, client_config={"retry_config": retries})
    return database.open_table(name)
