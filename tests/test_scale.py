"""What grows with the cluster, the table and the plan, and what does not: sizes and counts, no times."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.scale import peak_bytes
from checkpoints import drifted, saved, state_at
from conftest import Tables

from ray_lance_stream import merge_state_dicts
from ray_lance_stream.checkpoint import FILE_NAME, locate, read_streams
from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.packspec import Packing
from ray_lance_stream.packstate import SplitCursor
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, TableIdentity
from ray_lance_stream.rownumbers import RowNumbers, gathered
from ray_lance_stream.state import StreamState, merge_states
from ray_lance_stream.topology import Replica

SPLITS = 8192
REPLICAS = 1024
LIMIT_BYTES = 100_000  # of a checkpoint's file
MIB = 1024 * 1024


def skipping(ahead: dict[int, int], cycle: int = 10**9) -> StreamState:
    """A state of 8,192 splits, some of which have left rows out."""
    positions = [cycle + ahead.get(split, 0) for split in range(SPLITS)]
    return drifted([cycle] * SPLITS, positions)


FEW = {split: 1 + split % 99 for split in range(0, SPLITS, 200)}
ALL = {split: 1 + split * 7919 % 999_983 for split in range(SPLITS)}


def packed(offsets: list[int]) -> StreamState:
    """A packed state: every split stands in a document of its own."""
    packing = Packing(pack_sequences=1024, eos_id=0, pad_id=0, blocks_per_epoch=SPLITS * 100, num_splits=SPLITS)
    provenance = dataclasses.replace(state_at(num_splits=SPLITS).provenance, packing=packing)
    cursors = [SplitCursor(documents=700 + i * 31 % 97, offset=offset, blocks=70) for i, offset in enumerate(offsets)]
    return StreamState.of_packed(provenance, 1, cursors)


@pytest.mark.parametrize(
    ("state", "limit"),
    [
        (state_at(10**9, num_splits=SPLITS), 1000),
        (skipping({}), 1000),
        (skipping(FEW), 3000),
        (skipping(ALL), LIMIT_BYTES),
        (packed([i * 37 % 1025 for i in range(SPLITS)]), LIMIT_BYTES),
    ],
    ids=["cursor", "no skips", "skips in few", "skips in all", "packed"],
)
def test_a_checkpoint_is_small_and_holds_the_state(tmp_path: Path, state: StreamState, limit: int) -> None:
    saved(tmp_path, state)
    file = tmp_path / FILE_NAME
    assert file.stat().st_size < limit
    assert read_streams(*locate(tmp_path)) == {"train": state}
    assert max(map(len, file.read_text().splitlines())) > 10_000 or limit < LIMIT_BYTES  # a list is one line
    # In LanceDB's form there is one count for every split, whichever form the file has.
    samples = state.to_dict()["samples_consumed_per_split"]
    assert samples == state.samples.to_list() and len(samples) == SPLITS


def test_checkpoints_written_with_every_exception_by_name_are_read(tmp_path: Path) -> None:
    """The form in which files held uneven counts, however many."""
    state = skipping(ALL)
    saved(tmp_path, state)
    content = json.loads((tmp_path / FILE_NAME).read_text())
    exceptions = {str(split): 10**9 + ahead for split, ahead in ALL.items()}
    content["streams"]["train"]["positions_consumed_per_split"] = {"base": 10**9, "exceptions": exceptions}
    (tmp_path / FILE_NAME).write_text(json.dumps(content, indent=1, sort_keys=True))
    assert read_streams(*locate(tmp_path)) == {"train": state}


def parts(whole: dict[int, int]) -> list[StreamState]:
    """What 1,024 replicas know of a state: their own splits."""
    owned = [Replica(dp_rank=rank, dp_size=REPLICAS).owned_splits(SPLITS) for rank in range(REPLICAS)]
    return [skipping({split: whole[split] for split in own if split in whole}) for own in owned]


@pytest.mark.thorough
def test_states_of_many_replicas_are_small_and_merge() -> None:
    states = parts(ALL)
    assert max(len(pickle.dumps(state)) for state in states) < 2000  # 8 splits each, not 8,192
    assert merge_states(states) == skipping(ALL)
    few = [state.to_dict() for state in states[::128]]
    merged = merge_state_dicts(few)
    expected = {split: ALL[split] for rank in range(0, REPLICAS, 128) for split in range(8 * rank, 8 * rank + 8)}
    assert merged == skipping(expected).to_dict()


def test_merging_even_states_looks_at_no_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many replicas: only where rows were left out are counts compared split by split."""
    states = pickle.loads(pickle.dumps([pickle.dumps(state_at(num_splits=SPLITS)) for _ in range(REPLICAS)]))
    looked: list[SplitCounts] = []
    monkeypatch.setattr(SplitCounts, "dense", lambda counts: looked.append(counts))
    assert merge_states([pickle.loads(state) for state in states]).to_dict() == state_at(num_splits=SPLITS).to_dict()
    assert not looked


@pytest.mark.parametrize("clump", [1, 64, 1024])
def test_a_plan_holds_nothing_per_row(clump: int) -> None:
    order = OrderSpec(num_splits=SPLITS, shuffle_seed=7, shuffle_clump_size=clump)
    spec = PlanSpec(table=TableIdentity(version=1, fingerprint="f"), order=order, epoch=3)
    draw = np.random.default_rng(0)
    found: list[Any] = []

    def ask() -> None:
        plan = Plan(spec, 10**12)
        places = draw.integers(0, SPLITS, 10_000), draw.integers(0, plan.layout.rows_per_split, 10_000)
        found.append(plan.rows(*places))

    assert peak_bytes(ask) < 2 * MIB  # some arrays of 10,000
    assert found[0].min() >= 0 and found[0].max() < 10**12 and len(np.unique(found[0])) > 9990


def test_row_numbers_take_memory_for_fragments_and_deleted_rows_only() -> None:
    fragments, deleted_each = 1000, 20
    sizes = np.full(fragments, 10**9)  # 10**12 rows
    counts = np.full(fragments, deleted_each)
    deleted = (np.arange(fragments)[:, None] * 10**9 + np.arange(deleted_each) * 10**6).ravel()
    held = peak_bytes(lambda: RowNumbers(np.arange(fragments), sizes, counts, deleted))
    assert held < 100 * (fragments + len(deleted)) + MIB
    numbers = RowNumbers(np.arange(fragments), sizes, counts, deleted)
    rows = np.random.default_rng(0).integers(0, 10**12 - len(deleted), 1000)
    assert np.array_equal(numbers.from_addresses(numbers.to_addresses(rows).astype(np.uint64)), rows)


def test_rows_that_match_a_filter_are_not_held_twice_while_they_are_gathered() -> None:
    count, part = 2_000_000, 8192
    parts = [range(begin, min(begin + part, count)) for begin in range(0, count, part)]
    held = peak_bytes(lambda: gathered(np.arange(p.start, p.stop) for p in parts))
    assert held < 8 * count * 17 / 16 + 2 * MIB
    assert np.array_equal(gathered(np.arange(p.start, p.stop) for p in parts), np.arange(count))
    assert gathered(iter(())).shape == (0,)


def test_a_filter_of_a_table_takes_eight_bytes_a_row(tables: Tables) -> None:
    with tables.stream(50, filter="id >= 10").open() as shard:
        rows = shard._open_plan().matching_rows
    assert rows.tolist() == list(range(10, 50))
    assert rows.base is None and rows.nbytes == 8 * 40
