"""progress.py: the line that is shown, on a terminal and in a log."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from runs import wait_until

from ray_lance_stream import progress as progress_module
from ray_lance_stream.progress import SWITCH, Progress
from ray_lance_stream.stats import PrefetcherStats, RankStats, StreamStats

POOL = (PrefetcherStats(index=0, state="idle"), PrefetcherStats(index=1, state="starting"))


def stats(*places: tuple[int, int], restarts: int = 0) -> StreamStats:
    """A run whose ranks stand there, in epochs of 10 steps."""
    ranks = tuple(
        RankStats(rank=i, dp_rank=i, epoch=e, step=s, num_steps=10, rows_per_s=600.0, wait_share=0.1 * i)
        for i, (e, s) in enumerate(places)
    )
    return StreamStats(ranks=ranks, prefetchers=POOL, world_size=len(ranks), restarts=restarts)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_follows_the_slowest_rank_and_survives_a_restart() -> None:
    progress = Progress(StreamStats, epochs=4)
    assert progress.line(StreamStats()) == "starting workers, 0 s"
    said = "epoch 1, step 2/10  1,200 rows/s  10% waiting  2 workers  1 prefetcher"
    assert progress.line(stats((1, 3), (1, 2))) == f" 30%  {said}"
    assert progress.line(stats((1, 3), (1, 2)), columns=150) == f" 30% [#######.................]  {said}"
    assert progress.line(stats()) == " 30%  epoch 1, step 2/10  restarting workers, 0 s"
    back = progress.line(stats((1, 0), restarts=1))
    assert back == " 25%  epoch 1, step 0/10  600 rows/s  0% waiting  1 worker  1 prefetcher  1 restart"
    assert progress.line(stats((4, 0))).startswith("100%  all 4 epochs  600 rows/s")
    alone = Progress(StreamStats)
    assert alone.line(stats((3, 5))).startswith("epoch 3, step 5/10  ")
    assert alone.line(stats((3, 5)), columns=150).startswith(" 50% [############............]  epoch 3,")


@pytest.mark.parametrize(
    ("columns", "bar"),
    [(81, " 30% [#.....]  epoch"), (80, " 30%  epoch"), (87, " 30% [###.........]  ")],
)
def test_the_bar_gives_way_to_what_is_said(columns: int, bar: str) -> None:
    line = Progress(StreamStats, epochs=4).line(stats((1, 2)), columns=columns)
    assert line.startswith(bar) and len(line) <= columns and line.endswith("1 worker  1 prefetcher")


def test_a_run_that_gets_no_workers_says_for_how_long_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)

    def lacking() -> str:
        asked.append(now)
        return "Ray has no room for 4 x 1 CPU"

    progress = Progress(StreamStats, lacking)
    said = []
    for now in range(100, 112):  # noqa: B007 (read by the clock above)
        said.append(progress.line(StreamStats()))
    assert said[5] == "starting workers, 5 s"
    assert said[6] == "starting workers, 6 s: Ray has no room for 4 x 1 CPU"
    assert len(asked) == 1, "now and then"
    progress.line(stats((0, 1)))
    assert progress.line(stats()) == "epoch 0, step 1/10  restarting workers, 0 s"


def test_workers_that_are_not_heard_of_are_not_shown_as_if_they_worked(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    progress, heard = Progress(StreamStats), stats((0, 3), (0, 4))
    gone = replace(heard, ranks=tuple(replace(rank, silent_s=8.0) for rank in heard.ranks))
    assert "2 workers" in progress.line(heard)
    assert "2 workers" in progress.line(replace(heard, ranks=(heard.ranks[0], gone.ranks[1]))), "one is alive"
    assert progress.line(gone) == "epoch 0, step 3/10  no word from the workers, 0 s"
    now = 103.0
    assert progress.line(gone) == "epoch 0, step 3/10  no word from the workers, 3 s"
    assert progress.line(stats()) == "epoch 0, step 3/10  restarting workers, 3 s"
    assert "2 workers" in progress.line(heard)
    assert Progress(StreamStats).line(stats(restarts=2)) == "starting workers (try 3), 0 s"


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(progress_module, "_LOOK_EVERY_S", 0.01)
    yield
    assert not [t for t in threading.enumerate() if t.name == "lance-stream-progress"]


@pytest.mark.usefixtures("fast")
def test_a_terminal_gets_one_line_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    out = Terminal()
    with Progress(lambda: stats((0, 5)), out=out):
        wait_until(lambda: out.getvalue().count("\r") > 3, 5, "it is written again")
    assert out.getvalue().count("\n") == 1 and out.getvalue().endswith("prefetcher\n")
    lines = re.split(r"\r\x1b\[K", out.getvalue())[1:-1]
    assert {len(line) for line in lines} == {69}, "never wrapped"


@pytest.mark.usefixtures("fast")
def test_a_log_gets_a_line_now_and_then() -> None:
    out = io.StringIO()
    looks: list[StreamStats] = []

    def look() -> StreamStats:
        looks.append(stats((0, 5)))
        return looks[-1]

    with Progress(look, out=out, log_every_s=0.2):
        wait_until(lambda: out.getvalue().count("\n") == 2, 5, "a second line")
    assert len(looks) == 3, "the run is asked when it is told of, and at the end"
    assert "\r" not in out.getvalue() and "\x1b" not in out.getvalue()
    assert re.fullmatch(r"( +\d s  epoch 0, step 5/10  600 rows/s  0% waiting  .*\n){3}", out.getvalue())


@pytest.mark.usefixtures("fast")
def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    out = Terminal()
    with Progress(lambda: stats((0, 5)), out=out):
        pass
    assert out.getvalue() == ""


@pytest.mark.usefixtures("fast")
def test_an_error_ends_the_display_and_not_the_run(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> StreamStats:
        raise RuntimeError("the cluster is gone")

    with Progress(fail, out=io.StringIO(), log_every_s=0.0):
        wait_until(lambda: "not shown any longer" in caplog.text, 5, "a warning")
