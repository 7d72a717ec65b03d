"""A run of Ray Train that is looked at while it goes on: what it says of itself, to its driver and to others."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from checkpoints import run as command
from conftest import Tables
from ray.util.placement_group import placement_group, remove_placement_group
from runs import fit, opened, wait_until
from watchloops import Sleepy, watched

from ray_lance_stream import LanceStream, PrefetchConfig
from ray_lance_stream.cluster.room import lacking
from ray_lance_stream.progress import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.usefixtures("cluster")]
ROWS, RUN, TRAIN_S = 4000, "watched-run", 0.02
# 8 rows take 0.16 s of a prefetcher, while a trainer would take them in 0.02 s.
ROW_S = 0.02
SMALL = PrefetchConfig(num_actors=2, block_bytes=300, max_buffer_bytes=8000, placement_timeout_s=120, idle_timeout_s=20)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        _system_config={"metrics_report_interval_ms": 500},
    )
    yield
    ray.shutdown()


@dataclass(kw_only=True)
class Run:
    """The run that is looked at."""

    stream: LanceStream
    directory: Path


@pytest.fixture(scope="module")
def run(cluster: None, tables: Tables, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """Two workers that wait for a slow transform, in their second group."""
    del cluster
    directory = tmp_path_factory.mktemp("watched")
    stream = tables.stream(ROWS, transform=Sleepy(ROW_S, directory / "frozen"), prefetch=SMALL)
    failed: list[BaseException] = []

    def train() -> None:
        options: dict[str, Any] = {"dir": str(directory), "train_s": TRAIN_S}
        try:
            fit(watched, {"train": stream}, 2, directory, **options, name=RUN, max_failures=1, keep=None)
        except BaseException as error:  # shown by the fixture's end
            failed.append(error)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        wait_until(lambda: bool(failed) or stream.stats().restarts == 1, 240, "the second worker group")
        yield Run(stream=stream, directory=directory)
    finally:
        (directory / "stop").touch()
        thread.join(60)
        stream.close()
    assert not failed and not thread.is_alive()


def known_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def test_what_the_driver_sees(run: Run) -> None:
    said = "the transform is the limit"
    wait_until(lambda: said in run.stream.stats().verdict, 60, "what the limit is is known")
    stats = run.stream.stats()
    assert (stats.run, stats.stream, stats.world_size, stats.restarts) == (RUN, "train", 2, 1)
    assert stats.session.startswith(run.stream.config.stream_id)
    nodes = {node["NodeID"] for node in known_nodes()}
    for number, rank in enumerate(stats.ranks):
        assert (rank.rank, rank.dp_rank, rank.num_steps) == (number, number, ROWS // 8)
        assert rank.node in nodes and 0 <= rank.step <= rank.num_steps
        assert 0.001 < rank.wait_p50_s <= rank.wait_p99_s < 30
        assert 0.3 < rank.wait_share <= 1
        assert rank.buffered_bytes > 0 and 0 < rank.budget_bytes <= 4000
        assert rank.silent_s < 5
    assert [p.index for p in stats.prefetchers] == [0, 1] and stats.working == stats.wanted == 2
    for prefetcher in stats.prefetchers:
        assert prefetcher.node in nodes
        assert prefetcher.transform_s > 0.5 * prefetcher.rows * ROW_S  # it sleeps for no less
        assert prefetcher.take_s > 0 and 0.3 < prefetcher.busy_share <= 1 and prefetcher.take_share < 0.5
    assert stats.slowest is not None and stats.wait_share == stats.slowest.wait_share
    assert 0 < stats.rows_per_s < 4 / ROW_S and stats.epoch_and_step > (0, 0)
    assert re.fullmatch(
        rf"trainers wait \d+ % for data; {said}; .*\d+ more prefetchers? would hide it.*", stats.verdict
    )


def test_a_wait_names_its_block_and_who_was_asked(run: Run) -> None:
    (run.directory / "frozen").touch()
    try:
        wait_until(lambda: min((rank.waiting_s for rank in run.stream.stats().ranks), default=0) > 2, 30, "both wait")
        for rank in run.stream.stats().ranks:
            assert rank.waiting_for.startswith("positions ") and rank.waiting_for.endswith(
                f"of splits {2 * rank.rank} to {2 * rank.rank + 2}"
            )
            assert set(rank.asked_of) and set(rank.asked_of) <= {0, 1}
            assert rank.open_requests > 0
    finally:
        (run.directory / "frozen").unlink()


def test_a_shard_tells_of_itself(tables: Tables, tmp_path: Path) -> None:
    stream = tables.stream(40, transform=Sleepy(0.01, tmp_path / "frozen"), prefetch=SMALL)
    with opened(stream) as shard:
        assert "nothing is known yet" in shard.stats().verdict
        for _ in shard.iter_batches(prefetch_batches=0):
            stats = shard.stats()
            assert stats.buffered_bytes <= stats.budget_bytes == SMALL.max_buffer_bytes
        stats = shard.stats()
        assert 0.01 < stats.wait_p50_s <= stats.wait_p99_s <= stats.wait_s
        assert stats.wait_share > 0.5 and "this worker waits" in stats.verdict
        assert stats.waiting_s == 0 and stats.prefetchers in (1, 2)  # the second one may still be starting


# --- metrics ------------------------------------------------------------------------------------------


def scraped() -> dict[str, list[tuple[dict[str, str], float]]]:
    """What the node's Prometheus endpoint serves: (labels, value) of every sample, by name."""
    (node,) = known_nodes()
    with urllib.request.urlopen(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for name, labels, value in re.findall(r"^(\w+)\{(.*)\} (\S+)", text, flags=re.MULTILINE):
        found.setdefault(name, []).append((dict(re.findall(r'(\w+)="([^"]*)"', labels)), float(value)))
    return found


def test_the_endpoint_serves_every_metric_of_the_dashboard(run: Run) -> None:
    """With sensible values, and no tags but the run, the stream and the rank beside those of Ray."""
    shown = json.loads(command("dashboard").stdout)
    queries = [target["expr"] for panel in shown["panels"] for target in panel["targets"]]
    queries += [variable["definition"] for variable in shown["templating"]["list"] if "definition" in variable]
    named = {name for query in queries for name in re.findall(r"ray_lance_stream_\w+", query)}
    assert all(re.findall(r"ray_lance_stream_\w+", query) for query in queries)

    def ours() -> dict[str, list[tuple[dict[str, str], float]]]:
        found = {name: s for name, s in scraped().items() if name.startswith("ray_lance_stream_")}
        return {name: [s for s in samples if s[0]["run"] != "-"] for name, samples in found.items()}  # of no run

    unseen = {"ray_lance_stream_retries_total", "ray_lance_stream_rows_skipped_total"}  # a counter of nothing
    wait_until(lambda: named - unseen <= set(ours()), 30, "every metric")
    assert set(ours()) - named <= {name.removesuffix("_total") for name in named}, "every metric is shown"
    before = ours()
    wait_until(lambda: total(ours(), "rows_total") > total(before, "rows_total"), 30, "rows go on")
    after = ours()
    for name, samples in after.items():
        for labels, value in samples:
            assert (labels["run"], labels["stream"], value >= 0) == (RUN, "train", True), name
            assert set(labels) - {"run", "stream", "rank"} <= RAY_LABELS, "of few values"
            assert labels.get("rank", "0") in ("0", "1")
    assert {labels["rank"] for labels, _ in after["ray_lance_stream_step"]} == {"0", "1"}
    stats = run.stream.stats()
    assert total(after, "prefetchers_working") == total(after, "world_size") == 2 and total(after, "restarts") == 1
    # The first worker group's rows are counted as well.
    assert total(after, "rows_total") <= sum(rank.rows for rank in stats.ranks) + 100
    assert total(after, "transform_seconds_total") > total(after, "take_seconds_total") > 0
    assert 0 < total(after, "wait_p50_seconds") <= total(after, "wait_p99_seconds") < 60
    assert 0 < total(after, "budget_bytes") <= SMALL.max_buffer_bytes


RAY_LABELS = {
    *("Component", "JobId", "NodeAddress", "SessionName", "Version", "WorkerId", "NodeName", "NodeIP"),
    *("otel_scope_name", "otel_scope_version", "otel_scope_schema_url"),
}


def total(samples: dict[str, list[tuple[dict[str, str], float]]], name: str) -> float:
    return sum(value for _, value in samples[f"ray_lance_stream_{name}"])


# --- the command line ---------------------------------------------------------------------------------


def in_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command line in a process of its own, which knows of no cluster."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    program = [sys.executable, "-m", "ray_lance_stream.cli", *arguments]
    return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_status_says_who_waits_for_what(run: Run) -> None:
    address = ray.get_runtime_context().gcs_address
    (run.directory / "frozen").touch()
    try:
        wait_until(lambda: min((rank.waiting_s for rank in run.stream.stats().ranks), default=0) > 2, 30, "both wait")
        done = in_process("status", RUN, "--address", address, "--json")
        shown = command("status", RUN, columns=160)
    finally:
        (run.directory / "frozen").unlink()
    assert (done.returncode, done.stderr) == (0, "")
    (told,) = json.loads(done.stdout)["runs"]
    assert (told["run"], told["stream"], told["world_size"], told["restarts"]) == (RUN, "train", 2, 1)
    nodes = {node["NodeID"] for node in known_nodes()}
    for rank in told["ranks"]:
        assert rank["waiting_s"] > 2 and rank["node"] in nodes and rank["asked_of"]
        assert f"of splits {2 * rank['rank']} to {2 * rank['rank'] + 2}" in rank["waiting_for"]
    assert [(p["index"], p["state"]) for p in told["prefetchers"]] == [(0, "building"), (1, "building")]
    assert "trainers wait" in told["verdict"]
    assert (shown.exit_code, shown.stderr) == (0, "")
    assert f"run {RUN}, stream train ({told['session']})\n" in shown.stdout
    assert "restarted 1 time" in shown.stdout and "trainers wait" in shown.stdout
    assert re.search(
        r"^ +0 +\d+ +\d+/500 .* s +\w{8} +positions \d+ to \d+ of splits 0 to 2, asked of [01]", shown.stdout, re.M
    )
    assert re.search(r"^ +1 +building +\d+% ", shown.stdout, re.M)


def test_the_readmes_commands(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commands of its section on runs, with the name of this one."""
    text = Path(__file__).parent.parent.joinpath("README.md").read_text()
    (block,) = re.findall(r"^<!-- watch -->\n```bash\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    session = run.stream.stats().session
    for line in block.splitlines():
        program, *arguments = line.replace("digits", RUN).split()
        done = command(*arguments)
        assert (program, done.exit_code, done.stderr) == ("ray-lance-stream", 0, "")
        assert session in done.stdout or arguments[0] == "dashboard"
    (written,) = tmp_path.iterdir()
    assert written.read_text() == command("dashboard").stdout and len(block.splitlines()) == 4


def test_progress_follows_the_run(run: Run) -> None:
    out = io.StringIO()
    with Progress(run.stream.stats, out=out, log_every_s=0.5):
        wait_until(lambda: out.getvalue().count("\n") >= 3, 30, "lines")
    line = r" +\d+ s  epoch \d+, step \d+/500  \d+ rows/s  \d+% waiting  2 workers  2 prefetchers  1 restart"
    assert all(re.fullmatch(line, shown) for shown in out.getvalue().splitlines()), out.getvalue()


def test_status_of_what_is_not_there(run: Run) -> None:
    done = command("status", "other-run")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "no run 'other-run' is here" in done.stderr and RUN in done.stderr and "Traceback" not in done.stderr
    session = run.stream.stats().session
    assert session in command("status", session).stdout


def test_status_without_a_cluster() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        done = in_process("status", "--address", f"127.0.0.1:{unused.getsockname()[1]}")
    assert (done.returncode, done.stdout) == (2, "")
    assert "no Ray cluster could be joined" in done.stderr and "Traceback" not in done.stderr


def test_what_there_is_no_room_for_is_told(run: Run) -> None:
    del run  # whose workers have theirs
    assert lacking() is None
    group = placement_group([{"CPU": 64}, {"CPU": 64}, {"CPU": 1, "GPU": 1}])
    said = "Ray has no room for 2 x 64 CPU, 1 x 1 CPU + 1 GPU; `ray status` shows what there is"
    try:
        wait_until(lambda: lacking() == said, 60, "it is told")
    finally:
        remove_placement_group(group)
    wait_until(lambda: lacking() is None, 60, "nothing waits any more")
