"""Filters mean the same rows to LanceDB and to us, wherever a table lies and whatever the order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lancedb
import lancedb.streaming
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ray_lance_stream import ConfigError, StreamingDataset
from ray_lance_stream.location import TableRef
from ray_lance_stream.sqltext import as_lance_reads, check_stable

ROWS = 12
TEXTS = ["a", "it's", 'x"y', "b`c", "back\\", "", "/* no */", "-- no", '"q"', "''", "a", "n"]
DATA = pa.table(
    {
        "id": range(ROWS),
        "Id": [i * 7 % ROWS for i in range(ROWS)],
        "A b": [i % 5 for i in range(ROWS)],
        'q"u': [i % 3 for i in range(ROWS)],
        "text": TEXTS,
        "it's": TEXTS[::-1],
        "inner": [{"a": i % 4, "B c": f"t{i % 3}"} for i in range(ROWS)],
    }
)
NUMBERS = ("id", "Id", "A b", 'q"u', "inner.a")
STRINGS = ("text", "it's", "inner.B c")


class Places:
    """The same rows on disk and in memory, and how the rows that a filter finds are looked up in each."""

    def __init__(self, root: Path) -> None:
        self.on_disk = lancedb.connect(str(root)).create_table("t", DATA)
        self.in_memory = lancedb.connect("memory://").create_table("t", DATA)
        self.opened = [TableRef.of(table).open() for table in (self.on_disk, self.in_memory)]

    def lancedb_finds(self, filter: str) -> list[int] | None:
        """Returns the ids that LanceDB finds; None if the filter is an error to it."""
        try:
            found = self.on_disk.search().where(filter).limit(None).to_arrow()["id"].to_pylist()
            assert self.on_disk.count_rows(filter) == len(found)
        except ValueError:
            return None
        return sorted(found)

    def we_find(self, filter: str) -> list[list[int] | None]:
        """Returns the ids that we find on disk and in memory."""
        found: list[list[int] | None] = []
        for table in self.opened:
            try:
                rows = table.matching_rows(filter)
                assert table.count_rows(filter) == len(rows)
                found.append(rows.tolist())
            except ConfigError:
                found.append(None)
        return found


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Places:
    return Places(tmp_path_factory.mktemp("places"))


def quoted(name: str, quote: str) -> str:
    """Returns a column's path as SQL; without quotes where they are needed, that is another column or an error."""
    return ".".join(f"{quote}{part.replace(quote, 2 * quote)}{quote}" if quote else part for part in name.split("."))


def string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


@st.composite
def conditions(draw: st.DrawFn) -> str:
    """One comparison, some with comments and line breaks in it, some with a string in the wrong quotes."""
    quote = draw(st.sampled_from(['"', '"', '"', "`", ""]))
    gap = draw(st.sampled_from([" ", "\n", "/* it's \" */", " -- it's \"\n"]))
    if draw(st.booleans()):
        value: str = str(draw(st.integers(0, 5)))
        name = quoted(draw(st.sampled_from(NUMBERS)), quote)
    else:
        text = draw(st.sampled_from(TEXTS))
        other = quoted(draw(st.sampled_from(STRINGS)), '"')
        value = draw(st.sampled_from([string(text), string(text), other, f'"{text}"']))
        name = quoted(draw(st.sampled_from(STRINGS)), quote)
    return f"{name}{gap}{draw(st.sampled_from(['=', '!=', '<>', '<', '>=']))}{gap}{value}"


FILTERS = st.recursive(
    conditions(),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["AND", "or"]), inner).map(" ".join),
        inner.map(lambda text: f"NOT ({text}\n)"),
    ),
    max_leaves=3,
)


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(filter=FILTERS)
@example(filter="\"text\" != 'a'")
@example(filter='text = "a"')
@example(filter='"A b">2 and "inner"."B c"=\'t1\'')
@example(filter='"q""u" = 1 and "Id"in(1,2,7)')
@example(filter='lower("text") = \'a\' and cast("Id" as bigint) > -1')
@example(filter='"lower"("text") = \'a\'')
@example(filter='text in ("a", "b")')
@example(filter='"id" > 3 -- "it\'s')
@example(filter="text <> 'back\\' and \"id\" > 3")
@example(filter='"id" > 3 and text <> "a')
@example(filter='"ID" > 3')
def test_a_filter_finds_the_rows_that_lancedb_finds(places: Places, filter: str) -> None:
    assert places.we_find(filter) == [places.lancedb_finds(filter)] * 2


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("filter", ["\"text\" != 'a'", '"A b">2', "`it's` <> 'a' and \"it's\" <> ''"])
def test_every_order_has_the_rows_of_lancedb(places: Places, filter: str, shuffle: bool) -> None:
    theirs = [row["id"] for row in lancedb.streaming.StreamingDataset(places.on_disk, filter=filter, shuffle=shuffle)]
    assert 0 < len(theirs) < ROWS
    for table in (places.on_disk, places.in_memory):
        options: dict[str, Any] = {"filter": filter, "shuffle": shuffle}
        assert [row["id"] for row in StreamingDataset(table, **options)] == theirs
        ours = [row["id"] for row in StreamingDataset(table, order="feistel", **options)]
        assert sorted(ours) == sorted(theirs)


def test_a_state_keeps_the_filter_as_it_was_written_and_lancedb_goes_on_with_the_same_rows(places: Places) -> None:
    options: dict[str, Any] = {"filter": '"text" <> \'a\' and "id" > 1', "num_splits": 3, "shuffle": False}
    ours = StreamingDataset(places.on_disk, **options)
    rows = iter(ours)
    assert [next(rows)["id"] for _ in range(3)]
    state = ours.state_dict()
    assert state["provenance"]["filter"] == options["filter"]
    theirs = lancedb.streaming.StreamingDataset(places.on_disk, **options)
    theirs.load_state_dict(state)
    assert [row["id"] for row in theirs] == [row["id"] for row in rows]


def test_strings_in_double_quotes_are_refused_with_the_remedy(places: Places) -> None:
    for table in places.opened:
        with pytest.raises(ConfigError, match=r"No field named a\b.*strings stand in single quotes"):
            table.check_filter('text = "a"')


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        ('"a" > 1', "`a` > 1"),
        ('"a ""b`"', '`a "b```'),
        ("'\"a\"' || '''\"b\"'", "'\"a\"' || '''\"b\"'"),
        ('`a"b` <> "a"', '`a"b` <> `a`'),
        ('x /* "a" */ <> "a" -- "b"\n', 'x /* "a" */ <> `a` -- "b"\n'),
        ('x = "a', 'x = "a'),
        ("x = 'a\\' and \"b\"", "x = 'a\\' and `b`"),
    ],
)
def test_names_in_double_quotes_become_names_in_backticks(filter: str, expected: str) -> None:
    assert as_lance_reads(filter) == expected


@pytest.mark.parametrize("filter", ["x = r'a'", 'x = R"a"', 'x = b"a"', "x = N'a'", "x = $$a$$", "x = $1"])
def test_strings_that_no_reader_knows_are_refused(places: Places, filter: str) -> None:
    for table in places.opened:
        with pytest.raises(ConfigError, match="has a string that cannot be read"):
            table.check_filter(filter)


@pytest.mark.parametrize("filter", ["id = ?", "id = :x"])
def test_what_makes_lance_break_off_is_a_wrong_filter(places: Places, filter: str) -> None:
    for table in places.opened:
        with pytest.raises(ConfigError, match="does not work"):
            table.count_rows(filter)


@pytest.mark.parametrize(
    "filter",
    [
        "random() < 0.5",
        '"random"() < 0.5',
        "`Random` ( ) < 0.5",
        "random/* x */() < 0.5",
        "id > 1 and now() > timestamp '2020-01-01'",
        "CURRENT_DATE > date '2020-01-01'",
        "id > 1 or current_timestamp is null",
    ],
)
def test_filters_that_change_are_refused_however_they_are_written(filter: str) -> None:
    with pytest.raises(ConfigError, match="does not mean the same rows every time"):
        check_stable(filter)


@pytest.mark.parametrize(
    "filter",
    [
        "text <> 'random()'",
        '"now" > 2',
        "now > 2",
        "`current_date` > 2",
        "inner.current_date > 2",
        "id > 2 -- random()",
    ],
)
def test_names_and_strings_that_only_look_like_functions_are_not(filter: str) -> None:
    check_stable(filter)


def test_a_filter_that_fails_on_a_row_is_a_wrong_filter(places: Places) -> None:
    for filter in ("1/0=1", "id/0=1", "cast(text as int)=1"):
        for table in places.opened:
            for ask in (table.count_rows, table.matching_rows):
                with pytest.raises(ConfigError, match="does not work on table 't'") as caught:
                    ask(filter)
                assert ".rs:" not in str(caught.value)
        with pytest.raises(ConfigError, match="does not work on table 't'"):
            StreamingDataset(places.on_disk, filter=filter)


def test_the_rows_found_are_row_numbers(places: Places) -> None:
    for table in places.opened:
        rows = table.matching_rows('"A b" = 2')
        assert rows.dtype == np.int64 and rows.tolist() == [2, 7]
