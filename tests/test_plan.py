"""The plan: coverage, pinned orders and names, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream.errors import ConfigError
from ray_lance_stream.permutation import IntArray
from ray_lance_stream.plan import OrderSpec, Plan, PlanSpec, SplitLayout, TableIdentity, require_int

TABLE = TableIdentity(version=3, fingerprint="f00d")


def spec_of(num_splits: int = 4, *, epoch: int = 0, table: TableIdentity = TABLE, **order: Any) -> PlanSpec:
    return PlanSpec(table=table, order=OrderSpec(num_splits=num_splits, **order), epoch=epoch)


def all_rows(plan: Plan) -> IntArray:
    """Returns the rows of an epoch, shape (S, L)."""
    return plan.rows(np.arange(plan.layout.num_splits)[:, None], np.arange(plan.layout.rows_per_split))


# --- pinned orders and names: G9 ---------------------------------------------------------------------
# The rows are what users have trained on and recorded; a change needs a new PLAN_FORMAT. The plan ids
# are only names that one version of the package uses among its own actors; but a change here without a
# change of the spec's fields means that equal specs no longer have equal names everywhere.

GOLDEN: dict[str, tuple[PlanSpec, int, str, list[list[int]]]] = {
    "rows": (
        spec_of(shuffle_seed=42),
        23,
        "757da29b6de6951ad06e",
        [[17, 18, 13, 22, 7], [11, 2, 15, 9, 6], [10, 21, 3, 8, 0], [19, 14, 20, 5, 1]],
    ),
    "the next epoch": (
        spec_of(shuffle_seed=42, epoch=1),
        23,
        "769fca7c150297832857",
        [[13, 0, 6, 14, 2], [19, 4, 20, 12, 5], [9, 22, 1, 15, 11], [3, 18, 17, 21, 10]],
    ),
    "clumps": (
        spec_of(3, shuffle_seed=42, shuffle_clump_size=4, epoch=2),
        23,
        "fbabe23ea512fdbd2872",
        [[16, 17, 18, 19, 4, 5, 6], [7, 20, 21, 22, 8, 9, 10], [11, 0, 1, 2, 3, 12, 13]],
    ),
    "no shuffle": (
        spec_of(shuffle=False),
        23,
        "4bd45928c03d90008147",
        [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14], [15, 16, 17, 18, 19]],
    ),
    "filter": (
        spec_of(2, shuffle_seed=9, filter="x > 1"),
        9,
        "38dc1deecefc772de0c5",
        [[49, 0, 1, 25], [64, 36, 16, 4]],
    ),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_order(name: str) -> None:
    spec, num_rows, plan_id, rows = GOLDEN[name]
    matching = None if spec.order.filter is None else np.arange(num_rows) ** 2
    assert all_rows(Plan(spec, num_rows, matching)).tolist() == rows
    assert spec.plan_id == plan_id


# --- coverage: G2 ------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=150)
@given(
    st.data(),
    st.integers(1, 3000),
    st.integers(1, 40),
    st.booleans(),
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
)
def test_each_row_at_most_once_and_the_rest_counted(
    data: st.DataObject, num_rows: int, clump: int, shuffle: bool, seed: int, epoch: int
) -> None:
    num_splits = data.draw(st.integers(1, num_rows))
    spec = spec_of(num_splits, shuffle=shuffle, shuffle_seed=seed, shuffle_clump_size=clump, epoch=epoch)
    plan = Plan(spec, num_rows)
    rows = all_rows(plan)
    assert rows.shape == (num_splits, num_rows // num_splits)  # every split has the same size
    assert rows.dtype == np.int64
    unique = np.unique(rows)
    assert len(unique) == rows.size
    assert unique[0] >= 0
    assert unique[-1] < num_rows
    assert plan.layout.rows_per_split == num_rows // num_splits
    assert plan.layout.dropped_rows == num_rows % num_splits == num_rows - rows.size


def test_another_epoch_leaves_out_other_rows() -> None:
    """With a shuffle, no row is left out for good."""
    left_out = set(range(103))
    for epoch in range(60):
        left_out &= set(range(103)) - set(all_rows(Plan(spec_of(10, epoch=epoch), 103)).ravel().tolist())
    assert not left_out


def test_without_shuffle_split_and_position_count_through_the_table() -> None:
    plan = Plan(spec_of(7, shuffle=False, shuffle_seed=5, epoch=9), 100)
    assert np.array_equal(all_rows(plan), np.arange(7)[:, None] * 14 + np.arange(14))


def test_split_s_position_p_is_the_image_of_s_times_length_plus_p() -> None:
    """So one split is contiguous in the shuffled order, whatever num_splits was left out."""
    shuffled = all_rows(Plan(spec_of(1, shuffle_seed=8), 100))[0]
    rows = all_rows(Plan(spec_of(7, shuffle_seed=8), 100))
    assert np.array_equal(rows.ravel(), shuffled[:98])


def test_a_request_answers_the_same_as_the_whole() -> None:
    plan = Plan(spec_of(8, shuffle_seed=3, shuffle_clump_size=5), 1000)
    whole = all_rows(plan)
    rng = np.random.default_rng(0)
    splits, positions = rng.integers(0, 8, 300), rng.integers(0, 125, 300)
    assert np.array_equal(plan.rows(splits, positions), whole[splits, positions])
    assert np.array_equal(plan.rows(np.array([2]), np.arange(10, 20)), whole[2, 10:20])  # broadcast
    assert plan.rows(np.array([], dtype=np.int64), np.array([], dtype=np.int64)).size == 0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=200, unique=True), st.integers(1, 8), st.booleans())
def test_a_filter_maps_places_to_the_matching_rows(matching: list[int], clump: int, shuffle: bool) -> None:
    numbers = np.array(sorted(matching), dtype=np.int64)
    num_splits = min(5, len(numbers))
    order: dict[str, Any] = {"shuffle": shuffle, "shuffle_clump_size": clump, "shuffle_seed": 1}
    filtered = all_rows(Plan(spec_of(num_splits, filter="x", **order), len(numbers), numbers))
    places = all_rows(Plan(spec_of(num_splits, **order), len(numbers)))
    assert np.array_equal(filtered, numbers[places])


def test_rows_outside_the_plan_are_refused() -> None:
    plan = Plan(spec_of(4), 23)
    zero = np.array([0])
    for bad in (-1, 5, 10**15):
        with pytest.raises(IndexError, match="position"):
            plan.rows(zero, np.array([bad]))
    for bad in (-1, 4, 10**15):
        with pytest.raises(IndexError, match="split"):
            plan.rows(np.array([bad]), zero)


def test_memory_does_not_grow_with_the_table() -> None:
    """G8: without a filter the plan of a trillion rows is as small as that of a thousand."""
    splits, positions = np.arange(48)[:, None], np.arange(20)
    Plan(spec_of(48), 10**4).rows(splits, positions)  # whatever is cached once
    peaks = []
    for num_rows in (10**4, 10**12):
        tracemalloc.start()
        plan = Plan(spec_of(48, shuffle_clump_size=3), num_rows)
        plan.rows(splits, positions)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]
    assert len(pickle.dumps(plan)) < 4000


def test_matching_rows_and_filter_go_together() -> None:
    rows = np.arange(10)
    with pytest.raises(ValueError, match="goes with"):
        Plan(spec_of(), 10, rows)
    with pytest.raises(ValueError, match="goes with"):
        Plan(spec_of(filter="x"), 10)
    with pytest.raises(ValueError, match="10 rows"):
        Plan(spec_of(filter="x"), 11, rows)


# --- names -------------------------------------------------------------------------------------------


def test_plan_id_differs_when_any_field_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray_lance_stream.plan.ORDERS", ("feistel", "plan", "other"))
    base = spec_of(4, shuffle_seed=1)
    order_changes: dict[str, Any] = {
        "num_splits": 5,
        "shuffle": False,
        "shuffle_seed": 2,
        "shuffle_clump_size": 2,
        "filter": "x > 1",
        "order": "other",
    }
    others = [spec_of(**{"num_splits": 4, "shuffle_seed": 1, name: value}) for name, value in order_changes.items()]
    others += [
        dataclasses.replace(base, epoch=1),
        dataclasses.replace(base, table=TableIdentity(version=4, fingerprint="f00d")),
        dataclasses.replace(base, table=TableIdentity(version=3, fingerprint="f00e")),
        spec_of(4, shuffle_seed=1, filter=""),
        spec_of(4, shuffle_seed=1, filter="None"),
    ]
    others += [spec_of(4, shuffle_seed=1, order="plan", plan_digest=digest) for digest in ("a", "b")]
    monkeypatch.setattr("ray_lance_stream.plan.PLAN_FORMAT", 2)
    others.append(spec_of(4, shuffle_seed=1, plan_format=2))
    covered = {*order_changes, "plan_format", "plan_digest"}
    assert covered == {field.name for field in dataclasses.fields(OrderSpec)}, "a field this test does not know"
    ids = [base.plan_id, *(other.plan_id for other in others)]
    assert len(set(ids)) == len(ids)
    assert all(len(plan_id) == 20 for plan_id in ids)


def test_plan_id_is_a_function_of_the_fields_only() -> None:
    one, two = spec_of(4, filter="name = 'é'"), spec_of(4, filter="name = 'é'")
    assert one.plan_id == two.plan_id
    assert pickle.loads(pickle.dumps(one)).plan_id == one.plan_id
    assert pickle.loads(pickle.dumps(one)) == two


def test_specs_are_frozen_plain_values() -> None:
    spec = spec_of()
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.epoch = 1  # type: ignore[misc]
    json.dumps(dataclasses.asdict(spec))
    assert len({spec, spec_of()}) == 1


# --- what is refused ---------------------------------------------------------------------------------

NOT_INTEGERS = (True, False, "4", 4.0, None, float("nan"), [4], np.float64(4))


@pytest.mark.parametrize("value", [0, -1, 2**20 + 1, 10**5000, *NOT_INTEGERS], ids=lambda value: type(value).__name__)
def test_num_splits_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_splits is not valid.*Found: .*Remedy: .*48"):
        OrderSpec(num_splits=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("shuffle_seed", value) for value in (-1, 2**64, 10**5000, *NOT_INTEGERS)),
        *(("shuffle_clump_size", value) for value in (0, -3, 2**62 + 1, *NOT_INTEGERS)),
        *(("shuffle", value) for value in (0, 1, "yes", None, np.bool_(True))),
        *(("filter", value) for value in (0, True, b"x > 1", ["x > 1"])),
        *(("order", value) for value in ("Feistel", "", None, 1, ["feistel"])),
        *(("plan format", value) for value in (0, 2, "1", None)),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_order_fields_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{name} is .*Found: .*Expected: .*Remedy: "):
        OrderSpec(num_splits=4, **{name.replace(" ", "_"): value})


@pytest.mark.parametrize("value", [-1, *NOT_INTEGERS], ids=lambda value: type(value).__name__)
def test_epoch_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match="epoch is not valid"):
        spec_of(epoch=value)


def test_the_extremes_are_accepted() -> None:
    spec = spec_of(1, shuffle_seed=2**64 - 1, shuffle_clump_size=2**62, epoch=2**62)
    assert all_rows(Plan(spec, 10)).tolist() == [list(range(10))]  # one clump: nothing to shuffle
    assert all_rows(Plan(spec_of(10), 10)).size == 10


def test_fewer_rows_than_splits() -> None:
    with pytest.raises(ConfigError, match=r"fewer rows than splits.*3 rows .*num_splits=4.*smaller num_splits"):
        Plan(spec_of(4), 3)
    with pytest.raises(ConfigError, match=r"no rows to train on.*0 rows.*filter"):
        Plan(spec_of(4), 0)
    with pytest.raises(ConfigError, match="no rows to train on"):
        Plan(spec_of(4, filter="false"), 0, np.array([], dtype=np.int64))
    assert SplitLayout(num_rows=4, num_splits=4).dropped_rows == 0


def test_require_int_says_the_range() -> None:
    require_int("n", 3, minimum=3, maximum=3, remedy="r")
    with pytest.raises(ConfigError, match="an integer from 3 to 5"):
        require_int("n", 6, minimum=3, maximum=5, remedy="r")
    with pytest.raises(ConfigError, match="an integer >= 3"):
        require_int("n", 2, minimum=3, remedy="r")
