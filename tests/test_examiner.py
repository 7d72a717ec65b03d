"""cluster/examiner.py without a cluster: its prefetchers are small objects that die of what they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from ray.exceptions import ActorDiedError, RayTaskError

from ray_lance_stream.cluster.cuts import rows_of
from ray_lance_stream.cluster.examiner import Examiner
from ray_lance_stream.errors import BlockError, TransformError
from ray_lance_stream.plan import OrderSpec, PlanSpec, TableIdentity
from ray_lance_stream.request import PlanHandle, Ranges

BLOCK = Ranges(first_split=4, num_splits=3, start=10, stop=20)
SPEC = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=OrderSpec(num_splits=8), epoch=2)
HANDLE = PlanHandle(spec=SPEC, num_rows=400, matching_rows=None, schema=pa.schema([]), bytes_per_row=1.0)

Places = list[tuple[int, int]]


class Host:
    """Starts prefetchers; ``fate`` says what building some places does: nothing, or raises."""

    def __init__(self, fate: Callable[[Places], None]) -> None:
        self.fate = fate
        self.started = 0
        self.living: set[Any] = set()
        self.built: list[int] = []

    def start(self) -> Any:
        self.started += 1
        actor = SimpleNamespace()
        actor.__dict__.update(
            {name: SimpleNamespace(remote=getattr(self, f"_{name}")) for name in ("ready", "try_build", "rows_of")}
        )
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
        except ActorDiedError:
            self.living.clear()  # there is one at a time
            raise

    async def _rows_of(self, _: PlanHandle, ranges: Ranges) -> list[tuple[int, int, int]]:
        return [(1000 + position, split, position) for split, position in places(ranges)]


def places(ranges: Ranges) -> Places:
    splits, positions = ranges.places()
    return list(zip(splits.tolist(), positions.tolist(), strict=True))


def examine(monkeypatch: pytest.MonkeyPatch, host: Host, *blocks: Ranges) -> list[Any]:
    """Examines blocks at the same time; returns the findings or the errors."""
    monkeypatch.setattr("ray.kill", host.kill)

    async def run() -> list[Any]:
        examiner = Examiner(host.start, start_timeout_s=5)
        return await asyncio.gather(*(examiner.sound_parts(HANDLE, b) for b in blocks), return_exceptions=True)

    return asyncio.run(run())


def dies_of(condition: Callable[[Places], bool]) -> Callable[[Places], None]:
    def fate(rows: Places) -> None:
        if condition(rows):
            raise ActorDiedError()

    return fate


@pytest.mark.parametrize("victim", [(4, 10), (5, 14), (6, 19)])
def test_the_row_is_named_after_few_deaths(monkeypatch: pytest.MonkeyPatch, victim: tuple[int, int]) -> None:
    host = Host(dies_of(lambda rows: victim in rows))
    (error,) = examine(monkeypatch, host, BLOCK)
    assert isinstance(error, BlockError)
    assert f"row {1000 + victim[1]} of the table (split {victim[0]}, position {victim[1]}, epoch 2)" in str(error)
    assert host.started <= 9  # 10 cycles: 5 deaths at most; 3 splits: 2; one more trial; one to ask for the number


def test_sound_blocks_are_left_whole_and_share_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(dies_of(lambda _: False))
    assert examine(monkeypatch, host, BLOCK, BLOCK, BLOCK) == [[BLOCK]] * 3
    assert host.started == 1 and not host.living


def test_a_block_that_is_too_much_as_a_whole_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(dies_of(lambda rows: len(rows) > 10))
    (parts,) = examine(monkeypatch, host, BLOCK)
    assert [row for part in parts for row in places(part)] == places(BLOCK)
    assert max(map(rows_of, parts)) <= 10 and len(parts) <= 4


def test_a_process_killed_from_outside_makes_no_row_guilty(monkeypatch: pytest.MonkeyPatch) -> None:
    deaths = iter([True, True, False, True])

    def fate(_: Places) -> None:
        if next(deaths, False):
            raise ActorDiedError()

    (parts,) = examine(monkeypatch, Host(fate), BLOCK)
    assert [row for part in parts for row in places(part)] == places(BLOCK)


def test_an_error_is_no_death(monkeypatch: pytest.MonkeyPatch) -> None:
    def fate(_: Places) -> None:
        error: Any = RayTaskError  # untyped
        raise error("try_build", "traceback", TransformError("row 3"))

    host = Host(fate)
    assert examine(monkeypatch, host, BLOCK) == [[BLOCK]]
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
    assert examine(monkeypatch, host, BLOCK) == [[BLOCK]]
    assert not host.living
