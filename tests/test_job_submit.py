"""The README's commands for a cluster: a job is submitted, stopped, and goes on when it is submitted again."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from clusters import Head, started
from runs import wait_until

from ray_lance_stream import PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.fault, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent
ACTORS = {"Coordinator", "StateManager", "Prefetcher", "TrainController", "RayTrainWorker"}
NUM_CPUS = 3  # the example has three workers after its failure
# Appended to the submitted copy of the package: every process that imports that copy says so.
_NOTE = """
import os as _os
with open(_os.path.join({notes!r}, str(_os.getpid())), "w") as _note:
    _note.write(__file__)
"""


def readme_commands() -> dict[str, str]:
    """The commands that the README shows under marks like <!-- job: submit -->."""
    text = (ROOT / "README.md").read_text()
    found = re.findall(r"^<!-- job: (\S+) -->\n```bash\n(.*?)\n```$", text, flags=re.DOTALL | re.MULTILINE)
    return dict(found)


class Shell:
    """Runs the README's commands in a copy of the repository, against a cluster that wants a token."""

    def __init__(self, head: Head, directory: Path) -> None:
        self.checkout, self.shared, self.notes = (directory / name for name in ("checkout", "shared", "notes"))
        self.notes.mkdir()
        self.environment = head.environment() | {
            **with_token(directory),
            "RAY_API_SERVER_ADDRESS": head.dashboard,
            "SHARED": str(self.shared),
        }
        for name in ("ray_lance_stream", "examples"):
            shutil.copytree(ROOT / name, self.checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
        with (self.checkout / "ray_lance_stream" / "__init__.py").open("a") as package:
            package.write(_NOTE.format(notes=str(self.notes)))

    def run(self, command: str) -> str:
        """Runs a command to its end and returns what it printed."""
        done = self._started(command)
        printed, _ = done.communicate(timeout=600)
        assert done.returncode == 0, printed.decode()
        return printed.decode()

    def watch(self, command: str) -> tuple[subprocess.Popen[bytes], list[str]]:
        """Starts a command; its lines appear in the list as it prints them."""
        process, lines = self._started(command), list[str]()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:  # bytes: in text a carriage return would end a line too
                lines.append(line.decode())

        threading.Thread(target=read, daemon=True).start()
        return process, lines

    def _started(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.checkout,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def importers(self) -> dict[int, str]:
        """The running processes that have imported the submitted package, by what they call themselves."""
        found = {}
        for note in self.notes.iterdir():
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(int(note.name))
                # Of an older process if the number was given to another one since.
                if process.create_time() <= note.stat().st_mtime and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = " ".join(process.cmdline()).strip()
        return found

    def attempts(self) -> dict[int, list[dict[str, Any]]]:
        """What the workers of rank 0 have logged, by the start of their group."""
        logs = sorted((self.shared / "digits" / "ids").glob("*-0.jsonl"))
        return {int(log.stem[:-2]): [json.loads(line) for line in log.read_text().splitlines()] for log in logs}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell from which jobs can be submitted to a cluster of its own."""
    directory = tmp_path_factory.mktemp("job")
    make_token, start = readme_commands()["one-machine"].splitlines()
    assert start == f"ray start --head --num-cpus={NUM_CPUS}"  # which is run below, with ports that are free
    subprocess.run(make_token.split(), env=Head.environment() | with_token(directory), check=True)
    with started(with_token(directory), f"--num-cpus={NUM_CPUS}", "--include-dashboard=true") as head:
        # Comes up after the head, and answers those without a token in its own way.
        wait_until(lambda: answer_without_token(head.dashboard) is not None, 120, "the dashboard answers")
        yield Shell(head, directory)


def with_token(home: Path) -> dict[str, str]:
    """The variables of a shell whose user has a token in their home, or is about to make one."""
    return {"HOME": str(home), "RAY_AUTH_MODE": "token"}


def answer_without_token(dashboard: str) -> int | None:
    """The status with which a dashboard answers who has no token; None if there is none yet."""
    try:
        with urllib.request.urlopen(f"{dashboard}/api/jobs/", timeout=10) as response:
            status: int = response.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_the_readmes_job_is_submitted_stopped_and_submitted_again(shell: Shell) -> None:
    commands = readme_commands()
    assert list(commands) == ["one-machine", "submit", "stop", "again"]
    assert answer_without_token(shell.environment["RAY_API_SERVER_ADDRESS"]) == 401

    submitted, log = shell.watch(commands["submit"])

    def is_training() -> bool:
        assert submitted.poll() is None, "".join(log)
        # After the failure on purpose, and after a checkpoint of the workers that were started then.
        entries = list(shell.attempts().values())[1:]
        return bool(entries) and len(entries[0]) > 30

    wait_until(is_training, 800, "the job trains again after its failure on purpose")
    working = shell.importers()
    for actor in ACTORS:
        assert any(f"ray::{actor}" in title for title in working.values()), (actor, working)
    stopped_at = len(next(reversed(shell.attempts().values())))
    shell.run(commands["stop"])
    submitted.wait(60)  # it ends with the job
    idle_timeout_s = PrefetchConfig().idle_timeout_s
    wait_until(lambda: not shell.importers(), idle_timeout_s, "the processes of the job are gone")
    alive = json.loads(shell.run("ray list actors --filter state=ALIVE --format json 2>/dev/null"))
    assert not ACTORS & {actor["class_name"] for actor in alive}  # Ray's own, for all jobs, may stay
    logged = shell.attempts()
    (_, before) = list(logged.items())[-1]
    assert len(before) >= stopped_at

    again = shell.run(commands["again"])
    attempts = shell.attempts()
    assert len(attempts) == len(logged) + 1
    resumed = re.search(r"resuming after step (\d+) of 690 with 3 workers", again)
    assert resumed is not None, again
    steps_per_epoch = max(entry["at"][1] for entry in before)
    first_epoch, first_step = list(attempts.values())[-1][0]["at"]
    assert first_epoch * steps_per_epoch + first_step == int(resumed[1]) + 1
    assert "world sizes          2 -> 3 -> 3" in again and "ordered ids          equal" in again, again
    assert "Job 'digits-2' succeeded" in again

    assert "\r" not in "".join(log) + again
    place = r"^ +\d+ s +(\d+)%  (?:epoch (\d+), step (\d+)/23|all 30 epochs)"
    assert re.search(place + ".*  2 workers", "".join(log), flags=re.MULTILINE), log
    *places, end = re.findall(place, again, flags=re.MULTILINE)
    assert end == ("100", "", ""), again
    steps = [int(epoch) * 23 + int(step) for _, epoch, step in places]
    assert steps == sorted(steps) and [int(share) for share, *_ in places] == [
        pytest.approx(100 * done / 690, abs=0.5) for done in steps
    ], again
    packages = {Path(note.read_text()).parent for note in shell.notes.iterdir()}
    assert all("working_dir_files" in str(package) for package in packages), packages
