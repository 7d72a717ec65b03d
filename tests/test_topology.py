"""Ownership, steps and micro-batches: partitions, equal counts, and weights that make the global mean."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.topology import Replica, StepPlan, StepShare

ALL = [(splits, size) for splits in range(1, 65) for size in range(1, splits + 1)]


def group(size: int) -> list[Replica]:
    return [Replica(dp_rank=rank, dp_size=size) for rank in range(size)]


# --- ownership ---------------------------------------------------------------------------------------


def test_ownership_is_a_contiguous_even_partition_for_any_number_of_replicas() -> None:
    for splits, size in ALL:
        owned = [replica.owned_splits(splits) for replica in group(size)]
        assert [split for part in owned for split in part] == list(range(splits)), (splits, size)
        assert {len(part) for part in owned} <= {splits // size, -(-splits // size)}, (splits, size)


def test_ownership_is_the_formula_in_the_design() -> None:
    assert [list(replica.owned_splits(8)) for replica in group(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]
    assert Replica(dp_rank=2, dp_size=5).owned_splits(48) == range(19, 28)
    assert Replica().owned_splits(6) == range(6)


@pytest.mark.parametrize(("splits", "size"), [(1, 2), (4, 5), (48, 64)])
def test_more_replicas_than_splits(splits: int, size: int) -> None:
    match = rf"more replicas than splits.*{size} replicas.*num_splits={splits}.*at least {size}.*at most {splits}"
    with pytest.raises(ConfigError, match=match):
        Replica(dp_size=size).owned_splits(splits)
    for micro in (None, 1):
        with pytest.raises(ConfigError, match=match):
            StepShare(replica=Replica(dp_size=size), num_splits=splits, num_cycles=2, micro_batch_size=micro)


@pytest.mark.parametrize(("rank", "size"), [(-1, 4), (4, 4), (True, 4), ("0", 4), (0, 0), (0, -1), (0, 2.0), (0, None)])
def test_replicas_are_checked(rank: Any, size: Any) -> None:
    with pytest.raises(ConfigError, match=r"dp_(rank|size) is not valid"):
        Replica(dp_rank=rank, dp_size=size)


# --- steps -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 64), st.integers(1, 500), st.integers(1, 600), st.booleans())
def test_steps_cover_every_cycle_once(splits: int, length: int, per_step: int, drop_last: bool) -> None:
    assume(length >= per_step or not drop_last)
    plan = StepPlan(num_splits=splits, rows_per_split=length, global_batch_size=splits * per_step, drop_last=drop_last)
    steps = [plan.cycles(step) for step in range(plan.num_steps)]
    end = length // per_step * per_step if drop_last else length
    assert [cycle for step in steps for cycle in step] == list(range(end))
    assert plan.end_cycle == end
    assert all(len(step) == per_step for step in steps[: None if drop_last else -1])
    if not drop_last:
        assert len(steps[-1]) == (length % per_step or per_step)
    for number, step in enumerate(steps):
        for cycle in step:
            assert plan.step_of(cycle) == number
            assert plan.rest_of_step(cycle) == range(cycle, step.stop)
    for cycle in range(length + 1):
        assert plan.steps_done(cycle) == sum(step.stop <= cycle for step in steps)


def test_a_short_last_step() -> None:
    plan = StepPlan(num_splits=4, rows_per_split=10, global_batch_size=16)
    assert (plan.cycles_per_step, plan.num_steps, plan.end_cycle) == (4, 3, 10)
    assert plan.cycles(2) == range(8, 10)
    assert plan.rest_of_step(9) == range(9, 10)
    dropped = StepPlan(num_splits=4, rows_per_split=10, global_batch_size=16, drop_last=True)
    assert (dropped.num_steps, dropped.end_cycle) == (2, 8)
    with pytest.raises(ConfigError, match="drop_last leaves no step"):
        StepPlan(num_splits=4, rows_per_split=3, global_batch_size=16, drop_last=True)


def test_steps_outside_the_epoch() -> None:
    for drop_last, steps in ((False, 3), (True, 2)):
        plan = StepPlan(num_splits=4, rows_per_split=10, global_batch_size=16, drop_last=drop_last)
        for step in (-1, steps):
            with pytest.raises(IndexError, match=f"of {steps} steps"):
                plan.cycles(step)
        with pytest.raises(IndexError):
            plan.rest_of_step(plan.end_cycle if drop_last else 12)


@pytest.mark.parametrize(
    ("splits", "size", "nearest"), [(48, 500, "pass 480 or 528"), (48, 1, "pass 48"), (4, 6, "pass 4 or 8")]
)
def test_global_batch_size_that_is_no_whole_number_of_cycles(splits: int, size: int, nearest: str) -> None:
    match = rf"not a multiple.*global_batch_size={size}, num_splits={splits}.*Remedy: {nearest}\.$"
    with pytest.raises(ConfigError, match=match):
        StepPlan(num_splits=splits, rows_per_split=10, global_batch_size=size)
    for good in re.findall(r"\d+", nearest):
        StepPlan(num_splits=splits, rows_per_split=10, global_batch_size=int(good))


@pytest.mark.parametrize("size", [0, -48, True, "48", 48.0, None])
def test_global_batch_size_is_checked(size: Any) -> None:
    with pytest.raises(ConfigError, match="global_batch_size is not valid"):
        StepPlan(num_splits=1, rows_per_split=10, global_batch_size=size)


# --- shares and micro-batches ------------------------------------------------------------------------


def shares(splits: int, size: int, cycles: int, micro: int | None) -> list[StepShare]:
    return [
        StepShare(replica=replica, num_splits=splits, num_cycles=cycles, micro_batch_size=micro)
        for replica in group(size)
    ]


def check_micro_batches(step: list[StepShare], micro: int | None) -> None:
    assert len({share.num_micro_batches for share in step}) == 1, "a collective would wait for ever"
    assert sum(share.rows for share in step) == step[0].step_rows
    for share in step:
        assert share.rows == share.num_cycles * len(share.replica.owned_splits(share.num_splits))
        assert share.smallest_share <= share.rows <= share.largest_share
        parts = [share.micro_batch(index) for index in range(share.num_micro_batches)]
        assert [row for part in parts for row in part] == list(range(share.rows))
        assert all(len(part) > 0 for part in parts)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
        assert micro is None or max(map(len, parts)) <= micro


@settings(deadline=None, max_examples=200)
@given(st.data(), st.integers(1, 64), st.integers(1, 12))
def test_micro_batches(data: st.DataObject, splits: int, cycles: int) -> None:
    size = data.draw(st.integers(1, splits))
    largest = cycles * -(-splits // size)
    micro = data.draw(st.none() | st.integers(1, largest + 3))
    try:
        step = shares(splits, size, cycles, micro)
    except ConfigError as error:
        remedy = re.search(r"pass micro_batch_size=(\d+) or more", str(error))
        assert remedy is not None
        assert micro is not None
        least = int(remedy.group(1))
        assert least > micro
        for better in (least, least + 1, largest):
            check_micro_batches(shares(splits, size, cycles, better), better)
        with pytest.raises(ConfigError):  # and nothing smaller would have done
            shares(splits, size, cycles, least - 1)
    else:
        check_micro_batches(step, micro)


def test_a_micro_batch_size_that_works_for_a_step_works_for_a_short_one() -> None:
    """The last step is short, and a step is begun in the middle after a resume with another batch size."""
    for splits, size in ALL[::7]:
        for micro in range(1, 8):
            works = []
            for cycles in (1, 2, 5, 9):
                try:
                    StepShare(
                        replica=Replica(dp_size=size), num_splits=splits, num_cycles=cycles, micro_batch_size=micro
                    )
                except ConfigError:
                    works.append(False)
                else:
                    works.append(True)
            assert len(set(works)) == 1, (splits, size, micro, works)


def test_micro_batches_by_hand() -> None:
    step = shares(8, 3, 4, 5)  # shares of 8, 12 and 12 rows, at most 5 rows each: 3 micro-batches
    assert [share.rows for share in step] == [8, 12, 12]
    assert [[len(share.micro_batch(i)) for i in range(3)] for share in step] == [[2, 3, 3], [4, 4, 4], [4, 4, 4]]
    assert [share.num_micro_batches for share in shares(8, 3, 4, None)] == [1, 1, 1]


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(1, 16), st.integers(1, 60), st.integers(1, 7))
def test_the_ordered_global_batch_is_the_same_for_every_number_of_replicas(
    data: st.DataObject, splits: int, length: int, per_step: int
) -> None:
    """G1: the shares of a step, put back in canonical order, are q whole cycles of all splits."""
    steps = StepPlan(num_splits=splits, rows_per_split=length, global_batch_size=splits * per_step)
    step = steps.cycles(data.draw(st.integers(0, steps.num_steps - 1)))
    expected = [(cycle, split) for cycle in step for split in range(splits)]
    for size in range(1, splits + 1):
        parts = shares(splits, size, len(step), None)
        rows = [(cycle, split) for part in parts for cycle in step for split in part.replica.owned_splits(splits)]
        assert [len([row for row in rows if row[1] in part.replica.owned_splits(splits)]) for part in parts] == [
            part.rows for part in parts
        ]
        assert sorted(rows) == expected


@pytest.mark.parametrize("micro", [0, -1, True, "4", 2.0])
def test_micro_batch_size_is_checked(micro: Any) -> None:
    with pytest.raises(ConfigError, match="micro_batch_size is not valid"):
        StepShare(replica=Replica(), num_splits=4, num_cycles=1, micro_batch_size=micro)


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 48), st.integers(1, 9), st.integers(0, 2**32))
def test_loss_scale_makes_the_mean_over_the_step(data: st.DataObject, splits: int, cycles: int, seed: int) -> None:
    """What the trainer does: backward of loss_scale * mean per micro-batch, gradients averaged over replicas."""
    size = data.draw(st.integers(1, splits))
    least = math.ceil(math.ceil(splits / size) / (splits // size))
    micro = data.draw(st.none() | st.integers(least, least + 20))
    losses = np.random.default_rng(seed).normal(1.0, 3.0, (cycles, splits))
    total = 0.0
    for share in shares(splits, size, cycles, micro):
        owned = share.replica.owned_splits(splits)
        mine = losses[:, owned.start : owned.stop].ravel()  # canonical order within the share
        for index in range(share.num_micro_batches):
            part = mine[share.micro_batch(index).start : share.micro_batch(index).stop]
            total += share.loss_scale(len(part)) * float(part.mean()) / size
    assert math.isclose(total, float(losses.mean()), rel_tol=1e-9, abs_tol=1e-12)


def test_loss_scale_is_one_where_nothing_needs_weighting() -> None:
    for share in shares(48, 8, 10, None):
        assert share.loss_scale(share.rows) == 1.0
    assert [share.loss_scale(share.rows) for share in shares(8, 3, 1, None)] == [0.75, 1.125, 1.125]
