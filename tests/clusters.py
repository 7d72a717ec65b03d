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

import psutil
import ray.util

BIN = Path(sys.executable).parent  # where the ``ray`` and ``python`` of these tests are
STORE_BYTES = 150_000_000  # an object store for small tables; Ray takes 30 % of the memory for each node otherwise
_STARTED = "Ray runtime started"
_SLOW = "The current node timed out during startup"  # Ray waits for half a minute: too short on a busy machine
_STARTS = 3
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
        for _ in range(_STARTS):
            log = self._started([*command, *options], environment)
            if _SLOW not in log:
                break
            self._end()  # what it has left
        assert _STARTED in log, log

    def _started(self, command: list[str], environment: Mapping[str, str]) -> str:
        log = self.directory / "start.log"
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=self.environment() | {"RAY_TMPDIR": str(self.directory)} | dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        deadline = time.monotonic() + 180
        while _STARTED not in log.read_text() and self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return log.read_text()

    @staticmethod
    def environment() -> dict[str, str]:
        """What a shell would have: this one's variables, without those that the tests' own Ray needs."""
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
        return kept | {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}

    def stop(self) -> None:
        """Ends all its processes, and removes its files."""
        self._end()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _end(self) -> None:
        if self._process is None:
            return
        processes = self._processes()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        left = [process for process in processes | self._processes() if process.is_running()]
        for process in left:  # agents outlive the node they belong to if it is killed
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait(30)
        _, alive = psutil.wait_procs(left, timeout=30)
        assert not alive, alive

    def _processes(self) -> set[psutil.Process]:
        found = {process for process in psutil.process_iter() if self._belongs(process)}
        assert self._process is not None
        with contextlib.suppress(psutil.NoSuchProcess):
            started = psutil.Process(self._process.pid)
            found |= {started, *started.children(recursive=True)}
        return found

    def _belongs(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return any(f"{self.directory}/" in argument for argument in process.cmdline())
        return False


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
