"""States: round trips, provenance field by field, merging, and input that is not a state."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ray_lance_stream.counts import SplitCounts
from ray_lance_stream.errors import ConfigError, StateError, StateMismatchError
from ray_lance_stream.plan import OrderSpec, TableIdentity
from ray_lance_stream.provenance import OVERRIDABLE_FIELDS, Provenance, check_overrides, reconcile
from ray_lance_stream.state import StreamState, merge_state_dicts, merge_states

TABLE = TableIdentity(version=7, fingerprint="0123456789abcdef")
JSON = Any


def provenance_of(num_splits: int = 4, table: TableIdentity = TABLE, **order: Any) -> Provenance:
    fields: dict[str, Any] = {"shuffle_seed": 42, "filter": "x > 1", "shuffle_clump_size": 8, **order}
    return Provenance(table=table, order=OrderSpec(num_splits=num_splits, **fields))


def state_of(counts: list[int], positions: list[int] | None = None, epoch: int = 2, **order: Any) -> StreamState:
    return StreamState(
        provenance=provenance_of(len(counts), **order),
        epoch=epoch,
        samples=SplitCounts.of(counts),
        positions=SplitCounts.of(counts if positions is None else positions),
    )


@st.composite
def states(draw: st.DrawFn) -> StreamState:
    count = st.integers(0, 5) | st.integers(0, 2**62)
    samples = draw(st.lists(count, min_size=1, max_size=12))
    skipped = draw(st.lists(st.integers(0, 3), min_size=len(samples), max_size=len(samples)))
    order = OrderSpec(
        num_splits=len(samples),
        shuffle=draw(st.booleans()),
        shuffle_seed=draw(st.integers(0, 2**64 - 1)),
        shuffle_clump_size=draw(st.integers(1, 2**40)),
        filter=draw(st.none() | st.text(max_size=20)),
    )
    table = TableIdentity(version=draw(st.integers(0, 2**40)), fingerprint=draw(st.text(max_size=20)))
    return StreamState(
        provenance=Provenance(table=table, order=order),
        epoch=draw(st.integers(0, 2**40)),
        samples=SplitCounts.of(samples),
        positions=SplitCounts.of([a + b for a, b in zip(samples, skipped, strict=True)]),
    )


# --- round trips -------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=100)
@given(states(), st.booleans())
def test_load_of_save_is_the_state(state: StreamState, compact: bool) -> None:
    saved = state.to_dict(compact=compact)
    assert StreamState.from_dict(saved) == state
    text = json.dumps(saved, allow_nan=False)
    assert StreamState.from_dict(json.loads(text)) == state
    assert StreamState.from_dict(saved).to_dict(compact=compact) == saved


def plain(value: object) -> bool:
    """Whether a value is of exactly the types that JSON and torch.load(weights_only=True) know."""
    if type(value) is dict:
        return all(type(key) is str and plain(item) for key, item in value.items())
    if type(value) is list:
        return all(plain(item) for item in value)
    return value is None or type(value) in (bool, int, str)


@settings(deadline=None, max_examples=50)
@given(states())
def test_a_state_dict_is_plain_and_its_keys_are_lancedbs(state: StreamState) -> None:
    saved = state.to_dict()
    assert plain(saved)
    assert plain(state.to_dict(compact=True))
    lancedb = {"shuffle_seed", "num_splits", "epoch", "samples_consumed_per_split", "positions_consumed_per_split"}
    assert set(saved) == lancedb | {"format", "provenance"}
    assert len(saved["samples_consumed_per_split"]) == saved["num_splits"]


def test_the_saved_form_is_pinned() -> None:
    """Users have files with these keys; a change needs a new format number and a reader of the old one."""
    assert state_of([5, 5, 6, 5]).to_dict(compact=True) == {
        "format": 1,
        "shuffle_seed": 42,
        "num_splits": 4,
        "epoch": 2,
        "samples_consumed_per_split": {"base": 5, "exceptions": {"2": 6}},
        "positions_consumed_per_split": {"base": 5, "exceptions": {"2": 6}},
        "provenance": {
            "table_version": 7,
            "table_fingerprint": "0123456789abcdef",
            "filter": "x > 1",
            "order": "feistel",
            "shuffle": True,
            "shuffle_clump_size": 8,
            "plan_format": 1,
            "pack_sequences": None,
        },
    }
    assert state_of([5, 5, 6, 5]).to_dict()["samples_consumed_per_split"] == [5, 5, 6, 5]
    assert state_of([5, 5, 5, 5]).to_dict(compact=True)["samples_consumed_per_split"] == 5


def test_one_number_stands_for_all_splits() -> None:
    saved = state_of([3, 3, 3, 3]).to_dict()
    saved["samples_consumed_per_split"] = saved["positions_consumed_per_split"] = 3
    assert StreamState.from_dict(saved) == state_of([3, 3, 3, 3])


def test_keys_of_a_later_version_do_no_harm() -> None:
    saved = state_of([3, 3]).to_dict()
    saved["extra"] = saved["provenance"]["extra"] = {"a": [1]}
    assert StreamState.from_dict(saved) == state_of([3, 3])


def test_at_cycle() -> None:
    state = StreamState.at_cycle(provenance_of(6), 1, 9)
    assert state == state_of([9] * 6, epoch=1)
    assert state.completed_cycles == 9
    assert state_of([4, 9, 5]).completed_cycles == 4


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.data())
def test_counts_are_what_a_list_says(counts: list[int], data: st.DataObject) -> None:
    made = SplitCounts.of(counts)
    assert made.to_list() == counts
    assert made.least == min(counts)
    assert made.uniform == (len(set(counts)) == 1)
    same_length = st.lists(st.integers(0, 3), min_size=len(counts), max_size=len(counts))
    several = [counts, *data.draw(st.lists(same_length, min_size=1, max_size=4))]
    greatest = SplitCounts.greatest([SplitCounts.of(each) for each in several])
    assert greatest.to_list() == [max(of_split) for of_split in zip(*several, strict=True)]


def test_size_of_a_state() -> None:
    at_boundary = StreamState.at_cycle(provenance_of(8192), 3, 123_456_789)
    assert len(json.dumps(at_boundary.to_dict(compact=True))) < 2000
    drifted = state_of([10**9] * 8000 + [10**9 + i for i in range(192)])
    assert len(json.dumps(drifted.to_dict(compact=True))) < 12_000
    one_behind = state_of([10**9 - 1] + [10**9] * 8191)  # the base is the most frequent count
    assert len(json.dumps(one_behind.to_dict(compact=True))) < 2000


def test_a_base_that_no_split_has_does_not_count() -> None:
    counts = SplitCounts.from_json("samples", {"base": 0, "exceptions": {"0": 5, "1": 6}}, 2)
    assert (counts.to_list(), counts.least) == ([5, 6], 5)


# --- provenance: G5 ----------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "filter": "x > 2",
    "shuffle": False,
    "shuffle_seed": 43,
    "shuffle_clump_size": 1,
    "num_splits": 8,
    "order": "other",
    "plan_format": 2,
    "plan_digest": "b",
}


def changed(field: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Provenance, OrderSpec]:
    """Returns what a state belongs to, and the order of a stream that differs in one field."""
    saved = provenance_of()
    monkeypatch.setattr("ray_lance_stream.plan.ORDERS", ("feistel", "plan", "other"))
    if field == "plan_digest":
        planned = dataclasses.replace(saved.order, order="plan", plan_digest="a")
        return dataclasses.replace(saved, order=planned), dataclasses.replace(planned, plan_digest="b")
    if field == "plan_format":
        monkeypatch.setattr("ray_lance_stream.plan.PLAN_FORMAT", 2)
        return saved, dataclasses.replace(saved.order, plan_format=2)
    return saved, dataclasses.replace(saved.order, **{field: CHANGES[field]})


def test_every_field_of_the_order_is_compared() -> None:
    assert set(CHANGES) == {field.name for field in dataclasses.fields(OrderSpec)}


@pytest.mark.parametrize("field", CHANGES)
def test_a_state_of_other_data_is_refused(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, order = changed(field, monkeypatch)
    was = getattr(saved.order, field)
    with pytest.raises(StateMismatchError) as caught:
        reconcile(saved, order)
    assert (caught.value.field, caught.value.saved, caught.value.current) == (field, was, CHANGES[field])
    message = str(caught.value)
    assert message.startswith(f"{field} differs")
    assert repr(was) in message
    assert repr(CHANGES[field]) in message
    assert f"build the stream with {field}={was!r}" in message
    assert (f"allow_changes=('{field}',)" in message) == (field in OVERRIDABLE_FIELDS)


@pytest.mark.parametrize("field", sorted(set(CHANGES) & set(OVERRIDABLE_FIELDS)))
def test_an_override_lets_one_field_pass_and_no_other(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, order = changed(field, monkeypatch)
    assert reconcile(saved, order, allow_changes=(field,)) == order, "the stream's own value holds"
    others = [name for name in OVERRIDABLE_FIELDS if name != field]
    with pytest.raises(StateMismatchError) as caught:
        reconcile(saved, order, allow_changes=others)
    assert caught.value.field == field


def test_the_filter_may_come_or_go() -> None:
    for was, now in (("x > 1", None), (None, "x > 1")):
        with pytest.raises(StateMismatchError, match=r"^filter differs"):
            reconcile(provenance_of(filter=was), provenance_of(filter=now).order)


def test_the_same_order_is_accepted() -> None:
    saved = provenance_of()
    assert reconcile(saved, provenance_of().order) == saved.order


def test_a_drawn_seed_gives_way_to_the_saved_one() -> None:
    saved, stream = provenance_of(shuffle_seed=42), provenance_of(shuffle_seed=99).order
    assert reconcile(saved, stream, seed_given=False) == saved.order
    with pytest.raises(StateMismatchError, match=r"^shuffle_seed differs"):
        reconcile(saved, stream, seed_given=True)
    with pytest.raises(StateMismatchError, match=r"^filter differs"):  # the rest is still compared
        reconcile(saved, dataclasses.replace(stream, filter=None), seed_given=False)


def test_seed_and_clumps_mean_nothing_without_a_shuffle() -> None:
    saved = provenance_of(shuffle=False, shuffle_seed=1, shuffle_clump_size=1)
    assert reconcile(saved, provenance_of(shuffle=False, shuffle_seed=2, shuffle_clump_size=9).order)
    with pytest.raises(StateMismatchError, match=r"^shuffle differs"):
        reconcile(saved, provenance_of(shuffle=True, shuffle_seed=1, shuffle_clump_size=1).order)


@pytest.mark.parametrize("bad", ["filter", "", ("num_splits",), ("plan_format",), ("epoch",), ("filter", "typo"), [1]])
def test_overrides_that_do_not_exist(bad: Any) -> None:
    with pytest.raises(ConfigError, match=r"allow_changes is not valid.*filter.*shuffle_seed"):
        check_overrides(bad)
    with pytest.raises(ConfigError, match="allow_changes is not valid"):
        reconcile(provenance_of(), provenance_of().order, allow_changes=bad)
    check_overrides(OVERRIDABLE_FIELDS)


# --- merge -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=50)
@given(states(), st.integers(1, 5))
def test_equal_states_merge_to_themselves(state: StreamState, replicas: int) -> None:
    assert merge_states([state] * replicas) == state
    assert merge_state_dicts([state.to_dict()] * replicas) == state.to_dict()
    assert merge_state_dicts([state.to_dict(compact=True)] * replicas) == state.to_dict()


@settings(deadline=None, max_examples=100)
@given(st.data(), st.integers(2, 4), st.integers(2, 6))
def test_merge_takes_the_maximum_in_any_order(data: st.DataObject, replicas: int, splits: int) -> None:
    rows = st.lists(st.integers(4, 9), min_size=splits, max_size=splits)
    parts = []
    for _ in range(replicas):
        samples = data.draw(rows)
        samples[data.draw(st.integers(0, splits - 1))] = 4  # all have completed four cycles
        positions = [count + data.draw(st.integers(0, 5)) for count in samples]
        parts.append(state_of(samples, positions))
    merged = merge_states(parts)
    columns = [part.positions.to_list() for part in parts]
    assert merged.positions.to_list() == [max(column) for column in zip(*columns, strict=True)]
    assert merged.samples.to_list() == [
        max(column) for column in zip(*(part.samples.to_list() for part in parts), strict=True)
    ]
    for order in itertools.permutations(parts):
        assert merge_states(order) == merged
    assert StreamState.from_dict(merged.to_dict()) == merged


def test_replicas_at_different_cycles_are_refused_by_name() -> None:
    parts = [state_of([6, 6]), state_of([6, 6]), state_of([5, 6])]
    for order in itertools.permutations(parts):
        cycles = [part.completed_cycles for part in order]
        with pytest.raises(StateError) as caught:
            merge_states(order)
        assert not isinstance(caught.value, StateMismatchError)
        assert "different numbers of cycles" in str(caught.value)
        assert f"state 0: {cycles[0]}, state 1: {cycles[1]}, state 2: {cycles[2]}" in str(caught.value)
    with pytest.raises(StateError, match="different numbers of cycles"):
        merge_state_dicts([part.to_dict() for part in parts])


@pytest.mark.parametrize("field", CHANGES)
def test_states_of_other_data_do_not_merge(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, order = changed(field, monkeypatch)
    pair = [StreamState.at_cycle(saved, 0, 3), StreamState.at_cycle(Provenance(table=TABLE, order=order), 0, 3)]
    for states_ in (pair, pair[::-1]):
        with pytest.raises(StateMismatchError) as caught:
            merge_states(states_)
        assert caught.value.field == field


def test_other_tables_and_epochs_do_not_merge() -> None:
    here = StreamState.at_cycle(provenance_of(), 0, 3)
    for table in (TableIdentity(version=8, fingerprint=TABLE.fingerprint), TableIdentity(version=7, fingerprint="x")):
        with pytest.raises(StateMismatchError) as caught:
            merge_states([here, here, StreamState.at_cycle(provenance_of(table=table), 0, 3)])
        assert (caught.value.field, caught.value.saved, caught.value.current) == ("table", TABLE, table)
    with pytest.raises(StateMismatchError) as caught:
        merge_states([here, dataclasses.replace(here, epoch=1)])
    assert (caught.value.field, caught.value.saved, caught.value.current) == ("epoch", 0, 1)


def test_nothing_to_merge() -> None:
    with pytest.raises(StateError, match="no state to merge"):
        merge_state_dicts([])


# --- what is not a state -----------------------------------------------------------------------------

VALID = state_of([5, 5, 6, 5], [5, 7, 6, 5]).to_dict()
VALID_COMPACT = state_of([5, 5, 6, 5], [5, 7, 6, 5]).to_dict(compact=True)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
HUGE = 10**5000  # repr() and str() of it raise ValueError
ODD_VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "false": False,
    "negative": -1,
    "2**63": 2**63,
    "2**64": 2**64,
    "huge": HUGE,
    "float": 5.0,
    "nan": math.nan,
    "infinity": math.inf,
    "text": "5",
    "bytes": b"5",
    "list": [],
    "dict": {},
    "deep": DEEP,
    "long text": "x" * 10**6,
}
# What a field accepts of the above, besides the value that was saved.
ACCEPTED = {
    "provenance/filter": {"null", "text", "long text"},
    "provenance/table_fingerprint": {"text", "long text"},
    "provenance/pack_sequences": {"null"},
    "provenance/shuffle": {"true", "false"},
    "shuffle_seed": {"2**63"},
    "samples_consumed_per_split/exceptions": {"dict"},
}


def paths(value: Any, here: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Returns the path of every value in nested dicts."""
    found = [here] if here else []
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, (*here, key))
    return found


def with_value(state: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Returns a copy of the state with one value replaced."""
    made = copy.deepcopy(state)
    place = made
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return made


@pytest.mark.parametrize("path", paths(VALID_COMPACT), ids="/".join)
def test_each_value_is_checked(path: tuple[str, ...]) -> None:
    for name, odd in ODD_VALUES.items():
        damaged = with_value(VALID_COMPACT, path, odd)
        if name in ACCEPTED.get("/".join(path), ()):
            StreamState.from_dict(damaged)
            continue
        with pytest.raises(StateError) as caught:
            StreamState.from_dict(damaged)
            pytest.fail(f"{name} was accepted")
        assert len(str(caught.value)) < 600, "a message, not a dump"
        assert "Remedy: " in str(caught.value)


@pytest.mark.parametrize("path", [path for path in paths(VALID) if path[-1] not in ("filter", "pack_sequences")])
def test_each_value_must_be_there(path: tuple[str, ...]) -> None:
    damaged = copy.deepcopy(VALID)
    place = damaged
    for key in path[:-1]:
        place = place[key]
    del place[path[-1]]
    with pytest.raises(StateError):
        StreamState.from_dict(damaged)


@pytest.mark.parametrize(
    "counts",
    [
        [5, 5, 6],
        [5, 5, 6, 5, 5],
        [],
        [5, 5, 6, True],
        [5, 5, 6, "5"],
        [5, 5, 6, -1],
        [5, 5, 6, 2**63],
        [5, 5, 6, None],
        [[5], 5, 6, 5],
        (5, 5, 6, 5),
        {"base": 5},
        {"exceptions": {}},
        {"base": 5, "exceptions": [6]},
        {"base": 5, "exceptions": {"4": 6}},
        {"base": 5, "exceptions": {"-1": 6}},
        {"base": 5, "exceptions": {"1.0": 6}},
        {"base": 5, "exceptions": {"²": 6}},
        {"base": 5, "exceptions": {" 1": 6}},
        {"base": 5, "exceptions": {"": 6}},
        {"base": 5, "exceptions": {"9" * 5000: 6}},
        {"base": 5, "exceptions": {HUGE: 6}},
        {"base": 5, "exceptions": {None: 6}},
        {"base": 5, "exceptions": {"1": True}},
    ],
    ids=range(23),
)
@pytest.mark.parametrize("key", ["samples_consumed_per_split", "positions_consumed_per_split"])
def test_counts_are_checked(key: str, counts: Any) -> None:
    with pytest.raises(StateError, match=f"^the state's {key} "):
        StreamState.from_dict({**VALID, key: counts})


def test_positions_before_samples_are_refused() -> None:
    with pytest.raises(StateError, match="positions_consumed_per_split"):
        StreamState.from_dict({**VALID, "positions_consumed_per_split": [5, 7, 5, 5]})


def test_a_state_of_lancedb_is_named_as_such() -> None:
    """Their state has the same keys but no provenance: what it belongs to cannot be checked."""
    theirs = {key: value for key, value in VALID.items() if key not in ("format", "provenance")}
    with pytest.raises(StateError, match=r"does not say what data it belongs to.*lancedb\.streaming"):
        StreamState.from_dict(theirs)


def test_a_state_of_ours_without_its_format_is_damaged_and_not_one_of_lancedb() -> None:
    damaged = {key: value for key, value in VALID.items() if key != "format"}
    of = dataclasses.replace(StreamState.from_dict(VALID).provenance, order=OrderSpec(num_splits=4, order="lancedb"))
    for read in (
        lambda: StreamState.from_dict(damaged),
        lambda: StreamState.from_dict(
            damaged, of=dataclasses.replace(of, order=OrderSpec(num_splits=4, order="lancedb"))
        ),
        lambda: merge_state_dicts([damaged, damaged]),
    ):
        with pytest.raises(StateError, match="format is missing or damaged"):
            read()


@pytest.mark.parametrize("version", [0, 2, 10**30])
def test_another_format_is_refused(version: int) -> None:
    with pytest.raises(StateError, match="format is unknown"):
        StreamState.from_dict({**VALID, "format": version})


def test_a_few_bytes_cannot_claim_memory() -> None:
    """One number stands for all splits, so a foreign state could name any number of them."""
    for num_splits in (2**20 + 1, 2**40, 2**62, 2**70):
        claim = {**VALID, "num_splits": num_splits}
        claim["samples_consumed_per_split"] = claim["positions_consumed_per_split"] = 5
        with pytest.raises(StateError, match="num_splits"):
            StreamState.from_dict(claim)


@pytest.mark.parametrize("value", [None, 1, "{}", b"", [], [VALID], math.nan, True, {}, {1: 2}], ids=repr)
def test_things_that_are_no_state(value: Any) -> None:
    with pytest.raises(StateError):
        StreamState.from_dict(value)
    with pytest.raises(StateError):
        merge_state_dicts([value])


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**200, -(2**63)])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["feistel", "0", "3", "4"])
)
KEYS = st.sampled_from([path[-1] for path in paths(VALID)] + ["base", "exceptions", "0", "3", "4"]) | st.text(
    max_size=3
)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=20
)


def read_or_refuse(value: JSON) -> None:
    """What from_dict owes to any input: a state that saves and loads again, or StateError."""
    try:
        state = StreamState.from_dict(value)
    except StateError as error:
        assert not isinstance(error, StateMismatchError)
        return
    assert StreamState.from_dict(state.to_dict()).to_dict() == state.to_dict()
    json.dumps(state.to_dict(compact=True), allow_nan=False)


@settings(deadline=None, max_examples=150)
@given(ANYTHING)
def test_any_json_is_read_or_refused(value: JSON) -> None:
    read_or_refuse(value)


@settings(deadline=None, max_examples=200)
@given(st.data(), st.sampled_from([VALID, VALID_COMPACT]), st.integers(1, 3))
def test_a_damaged_state_is_read_or_refused(data: st.DataObject, base: dict[str, Any], changes: int) -> None:
    for _ in range(changes):
        path = data.draw(st.sampled_from(paths(base)))
        base = with_value(base, path, data.draw(ANYTHING))
    read_or_refuse(base)
