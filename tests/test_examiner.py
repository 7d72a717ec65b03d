"""cluster/examiner.py without a cluster: its prefetchers are small objects that die of what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayTaskError

from ray_lance_stream.cluster.cuts import rows_of
from ray_lance_stream.cluster.examiner import Examiner, Findings
from ray_lance_stream.errors import BlockError, DeadlyRowError, TransformError
from ray_lance_stream.plan import OrderSpec, PlanSpec, TableIdentity
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import ErrorPolicy, SkippedRow

BLOCK = Ranges(first_split=4, num_splits=3, start=10, stop=20)
SPEC = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=8), epoch=2)
HANDLE = PlanHandle(spec=SPEC, num_rows=400, matching_rows=None, schema=pa.schema([]), bytes_per_row=1.0)

Places = list[tuple[int, int]]


METHODS = ("ready", "try_build", "rows_of", "left_out")


class Host:
    """Starts prefetchers; ``fate`` says what building some places does: nothing, or raises."""

    def __init__(self, fate: Callable[[Places], None], policy: ErrorPolicy | None = None) -> None:
        self.fate = fate
        self.policy = policy or ErrorPolicy("raise")
        self.started = 0
        self.living: set[Any] = set()
        self.built: list[int] = []

    def start(self) -> Any:
        self.started += 1
        actor = SimpleNamespace()
        actor.__dict__.update({name: SimpleNamespace(remote=getattr(self, f"_{name}")) for name in METHODS})
        self.living.add(id(actor))
        return actor

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        self.living.discard(id(actor))

    async def _ready(self) -> tuple[str, int]:
        return "node", self.started

    async def _try_build(self, _: PlanHandle, ranges: Ranges) -> None:
        await asyncio.sleep(0)
        self.built.append(rows_of(ranges))
        try:
            self.fate(places(ranges))
        except (ActorDiedError, OutOfMemoryError):
            self.living.clear()  # there is one at a time
            raise

    async def _rows_of(self, _: PlanHandle, ranges: Ranges) -> list[tuple[int, int, int]]:
        return [(1000 + position, split, position) for split, position in places(ranges)]

    async def _left_out(self, handle: PlanHandle, ranges: Ranges, error: Exception) -> SkippedRow | None:
        (row,) = await self._rows_of(handle, ranges)
        return self.policy.left_out(error, *row)


def places(ranges: Ranges) -> Places:
    splits, positions = ranges.places()
    return list(zip(splits.tolist(), positions.tolist(), strict=True))


def examine(monkeypatch: pytest.MonkeyPatch, host: Host, *blocks: Ranges) -> list[Any]:
    """Examines blocks at the same time; returns the findings or the errors."""
    monkeypatch.setattr("ray.kill", host.kill)

    async def run() -> list[Any]:
        examiner = Examiner(host.start, start_timeout_s=5)
        return await asyncio.gather(*(examiner.examine(HANDLE, b) for b in blocks), return_exceptions=True)

    return asyncio.run(run())


def dies_of(
    condition: Callable[[Places], bool], error: Callable[[], Exception] = ActorDiedError
) -> Callable[[Places], None]:
    def fate(rows: Places) -> None:
        if condition(rows):
            raise error()

    return fate


@pytest.mark.parametrize("victim", [(4, 10), (5, 14), (6, 19)])
def test_the_row_is_named_after_few_deaths(monkeypatch: pytest.MonkeyPatch, victim: tuple[int, int]) -> None:
    host = Host(dies_of(lambda rows: victim in rows))
    (error,) = examine(monkeypatch, host, BLOCK)
    assert isinstance(error, BlockError)
    assert f"row {1000 + victim[1]} of the table (split {victim[0]}, position {victim[1]}, epoch 2)" in str(error)
    assert host.started <= 9  # 10 cycles: 5 deaths at most; 3 splits: 2; one more trial; one to ask for the number


def test_a_row_for_which_memory_is_too_small_is_named_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's memory monitor ends a process that is not restarted with an error of its own."""

    killed: Any = OutOfMemoryError  # untyped

    def fate() -> Callable[[Places], None]:
        return dies_of(lambda rows: (5, 14) in rows, lambda: killed("due to memory pressure"))

    (error,) = examine(monkeypatch, Host(fate()), BLOCK)
    assert isinstance(error, DeadlyRowError) and "split 5, position 14" in str(error)
    (found,) = examine(monkeypatch, Host(fate(), ErrorPolicy("skip")), BLOCK)
    assert [(row.split, row.position) for row in found.deadly] == [(5, 14)]


def test_sound_blocks_are_left_whole_and_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(dies_of(lambda _: False))
    assert examine(monkeypatch, host, BLOCK, BLOCK, BLOCK) == [Findings([BLOCK])] * 3
    assert host.started == 1 and not host.living


def test_a_block_that_is_too_much_as_a_whole_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(dies_of(lambda rows: len(rows) > 10))
    (findings,) = examine(monkeypatch, host, BLOCK)
    assert [row for part in findings.parts for row in places(part)] == places(BLOCK)
    assert max(map(rows_of, findings.parts)) <= 10 and len(findings.parts) <= 4


def test_a_process_killed_from_outside_makes_no_row_guilty(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = iter([True, True, False, True])

    def fate(_: Places) -> None:
        if next(deaths, False):
            raise ActorDiedError()

    (findings,) = examine(monkeypatch, Host(fate, ErrorPolicy("skip")), BLOCK)
    assert [row for part in findings.parts for row in places(part)] == places(BLOCK)
    assert not findings.deadly


def test_rows_that_kill_are_left_out_where_the_stream_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    victims = {(4, 10), (5, 14), (5, 15)}
    host = Host(dies_of(lambda rows: not victims.isdisjoint(rows)), ErrorPolicy("skip"))
    (findings,) = examine(monkeypatch, host, BLOCK)
    assert [row for part in findings.parts for row in places(part)] == places(BLOCK)
    assert {(row.split, row.position) for row in findings.deadly} == victims
    assert {row.row_number for row in findings.deadly} == {1010, 1014, 1015}
    assert all(row.reason.startswith("DeadlyRowError: row 10") and not row.replaced for row in findings.deadly)
    for part in findings.parts:
        assert rows_of(part) == 1 or victims.isdisjoint(places(part))


def test_a_function_is_asked_whether_a_row_that_kills_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Exception] = []

    def only_14(error: Exception) -> bool:
        asked.append(error)
        return "position 14" in str(error)

    host = Host(dies_of(lambda rows: not {(4, 14), (5, 17)}.isdisjoint(rows)), ErrorPolicy(only_14))
    (error,) = examine(monkeypatch, host, BLOCK)
    assert isinstance(error, DeadlyRowError) and "position 17" in str(error)
    assert [type(error) for error in asked] == [DeadlyRowError, DeadlyRowError]


def test_a_row_that_spares_the_last_process_is_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = iter([True, True, False])

    def fate(rows: Places) -> None:
        if (len(rows) > 1 and (4, 10) in rows) or (rows == [(4, 10)] and next(alone, False)):
            raise ActorDiedError()

    (findings,) = examine(monkeypatch, Host(fate, ErrorPolicy("skip")), BLOCK)
    assert [row for part in findings.parts for row in places(part)] == places(BLOCK)
    assert not findings.deadly


def test_an_error_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def fate(_: Places) -> None:
        error: Any = RayTaskError  # untyped
        raise error("try_build", "traceback", TransformError("row 3"))

    host = Host(fate)
    assert examine(monkeypatch, host, BLOCK) == [Findings([BLOCK])]
    assert host.built == [30]


def test_processes_that_die_of_everything_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter(range(10_000))
    # Every row dies once and is then found sound, so that no row is to blame and the search would go on.
    host = Host(dies_of(lambda rows: len(rows) > 1 or next(calls) % 2 == 0))
    (error,) = examine(monkeypatch, host, Ranges(first_split=0, num_splits=8, start=0, stop=50))
    assert isinstance(error, BlockError) and "no single row is the cause" in str(error)
    assert host.started <= 48 and not host.living


def test_without_a_process_the_block_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(dies_of(lambda _: False))

    async def dead() -> Any:
        raise ActorDiedError()

    monkeypatch.setattr(host, "_ready", dead)
    assert examine(monkeypatch, host, BLOCK) == [Findings([BLOCK])]
    assert not host.living
