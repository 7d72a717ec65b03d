"""A Ray cluster started from the command line, with ports, files and processes of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray.util
from nodes import _descendants
from runs import is_running, wait_until

BIN = Path(sys.executable).parent  # where the ``ray`` and ``python`` of these tests are
STORE_BYTES = 150_000_000  # an object store for small tables; Ray takes 30 % of the memory for each node otherwise
_HEAD_PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "ray-client-server-port")


class Head:
    """A head node.

    Attributes:
        directory: The cluster's files. Short: Ray makes sockets in it, whose paths may have 107 characters.
        address: What ``ray.init`` takes.
        dashboard: What ``ray job`` takes.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="rls"))
        self._ports = dict(zip(_HEAD_PORTS, free_ports(len(_HEAD_PORTS)), strict=True))
        here = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self.address = f"{here}:{self._ports['port']}"
        self.dashboard = f"http://127.0.0.1:{self._ports['dashboard-port']}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str], *options: str) -> None:
        """Starts it and waits until it is there.

        Args:
            environment: Variables of its processes and of every node that it launches.
            options: Further ones of ``ray start``.
        """
        ports = [f"--{name}={port}" for name, port in self._ports.items()]
        fixed = ["--min-worker-port=0", "--max-worker-port=0", f"--object-store-memory={STORE_BYTES}"]
        command = [f"{BIN}/ray", "start", "--head", "--block", f"--temp-dir={self.directory}/ray", *ports, *fixed]
        log = self.directory / "start.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *options],
                env=self.environment() | {"RAY_TMPDIR": str(self.directory)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 180
        while b"Ray runtime started" not in log.read_bytes():
            assert self._process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    @staticmethod
    def environment() -> dict[str, str]:
        """What a shell would have: this one's variables, without those that the tests' own Ray needs."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        return kept | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def stop(self) -> None:
        """Ends all its processes, and removes its files."""
        processes = self._processes()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        processes |= self._processes()
        for pid in processes:  # agents outlive the node they belong to if it is killed
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.wait(30)
        wait_until(lambda: not any(map(is_running, processes)), 30, "the cluster's processes are gone")
        shutil.rmtree(self.directory, ignore_errors=True)

    def _processes(self) -> set[int]:
        found = set() if self._process is None else {self._process.pid, *_descendants(self._process.pid)}
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if f"{self.directory}/".encode() in path.read_bytes():
                    found.add(int(path.parent.name))
        return found - {os.getpid()}


@contextlib.contextmanager
def started(environment: Mapping[str, str], *options: str) -> Iterator[Head]:
    """A head that ends with the context; see :meth:`Head.start`."""
    head = Head()
    try:
        head.start(environment, *options)
        yield head
    finally:
        head.stop()


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody listens on."""
    with contextlib.ExitStack() as sockets:
        opened = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for each in opened:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in opened]
