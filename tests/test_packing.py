"""Packing: blocks against a reference written token by token, and against LanceDB's own class, state by state."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lancedb.streaming import StreamingDataset

from ray_lance_stream.errors import ConfigError, StateError
from ray_lance_stream.packing import SplitPacker
from ray_lance_stream.packspec import Packing, estimate_blocks, exact_blocks, sample_positions
from ray_lance_stream.packstate import (
    PackBuffer,
    SplitCursor,
    cursors_from_json,
    cursors_from_lancedb,
    cursors_to_json,
    cursors_to_lancedb,
    merge_cursors,
)

EOS, PAD = 0, -1
Block = tuple[list[int], list[int]]  # input_ids, doc_ids


def packing_of(size: int, blocks: int, num_splits: int = 1) -> Packing:
    return Packing(
        pack_sequences=size, eos_id=EOS, pad_id=PAD, num_splits=num_splits, blocks_per_epoch=blocks * num_splits
    )


# --- the reference: one split, token by token ----------------------------------------------------------


@dataclass(frozen=True)
class Documents:
    """The documents of a split: where each stands, and its tokens."""

    positions: list[int]
    tokens: list[list[int]]

    def after(self, position: int) -> Documents:
        """Returns those from a position on."""
        kept = [i for i, at in enumerate(self.positions) if at >= position]
        return Documents([self.positions[i] for i in kept], [self.tokens[i] for i in kept])

    @property
    def total(self) -> int:
        return sum(len(tokens) + 1 for tokens in self.tokens)


def reference_blocks(documents: Documents, size: int, count: int) -> list[Block]:
    stream: list[tuple[int, bool]] = []
    for tokens in documents.tokens:
        stream += [(token, at == 0) for at, token in enumerate([*tokens, EOS])]
    stream += [(PAD, False)] * (size * count)
    blocks = []
    for block in range(count):
        input_ids, doc_ids, number = [], [], 0
        for at, (token, starts) in enumerate(stream[block * size : (block + 1) * size]):
            number += starts and at > 0
            input_ids.append(token)
            doc_ids.append(number)
        blocks.append((input_ids, doc_ids))
    return blocks


def reference_cursor(documents: Documents, size: int, blocks: int) -> SplitCursor:
    left, after = size * blocks, 0
    for position, tokens in zip(documents.positions, documents.tokens, strict=True):
        if left == 0:
            break
        if left < len(tokens) + 1:
            return SplitCursor(documents=position, offset=left, blocks=blocks)
        left, after = left - len(tokens) - 1, position + 1
    return SplitCursor(documents=after, blocks=blocks)


@dataclass(frozen=True)
class Case:
    documents: Documents
    size: int
    count: int

    @property
    def packing(self) -> Packing:
        return packing_of(self.size, self.count)

    @property
    def blocks(self) -> list[Block]:
        return reference_blocks(self.documents, self.size, self.count)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    # Tokens include the separator's and the padding's: neither may be taken for one.
    kinds = [EOS, PAD, 1, 2, 3, -(2**63), 2**63 - 1]
    lengths = draw(st.lists(st.integers(0, 9) | st.integers(20, 40), max_size=9))
    choices = np.random.default_rng(draw(st.integers(0, 2**32)))
    tokens = [[kinds[i] for i in choices.integers(0, len(kinds), length)] for length in lengths]
    gaps = draw(st.lists(st.integers(1, 3) | st.just(1), min_size=len(tokens), max_size=len(tokens)))
    positions = [at - 1 for at in itertools.accumulate(gaps)]
    documents = Documents(positions, tokens)
    size = draw(st.integers(1, 12))
    enough = documents.total // size
    return Case(documents, size, draw(st.integers(1, enough + 3)))


def feed(packer: SplitPacker, documents: Documents, *, dtype: Any = np.int64) -> None:
    flat = list(itertools.chain.from_iterable(documents.tokens))
    lengths = [len(tokens) for tokens in documents.tokens]
    packer.feed(np.array(flat, dtype=dtype), np.array(lengths), np.array(documents.positions, dtype=np.int64))


def in_parts(documents: Documents, sizes: Iterator[int]) -> Iterator[Documents]:
    at = 0
    while at < len(documents.tokens):
        size = next(sizes)
        yield Documents(documents.positions[at : at + size], documents.tokens[at : at + size])
        at += size


def taken(blocks: tuple[Any, Any]) -> list[Block]:
    input_ids, doc_ids = blocks
    assert input_ids.dtype == doc_ids.dtype == np.int64 and input_ids.shape == doc_ids.shape
    return list(zip(input_ids.tolist(), doc_ids.tolist(), strict=True))


def rest_of(packer: SplitPacker, documents: Documents, at_once: int = 1) -> list[Block]:
    """Returns all blocks the packer gives, fed what comes from its cursor on, only as long as it wants some."""
    got = []
    for part in in_parts(documents.after(packer.cursor().documents), itertools.repeat(at_once)):
        if not packer.tokens_wanted:
            break
        feed(packer, part)
        got += taken(packer.pop(packer.blocks_ready))
    if packer.tokens_wanted:
        packer.pad_out()
    return got + taken(packer.pop(packer.blocks_ready))


def stops(case: Case, start: SplitCursor | None = None, at_once: int = 1) -> Iterator[tuple[int, SplitPacker]]:
    """Yields a packer at the start and after every block of its epoch, one block taken at a time."""
    packer = SplitPacker(case.packing, start)
    parts = in_parts(case.documents.after(packer.cursor().documents), itertools.repeat(at_once))
    yield case.count - packer.blocks_left, packer
    while packer.blocks_left:
        if not packer.blocks_ready:
            part = next(parts, None)
            packer.pad_out() if part is None else feed(packer, part)
            continue
        packer.pop(1)
        yield case.count - packer.blocks_left, packer


# --- blocks ----------------------------------------------------------------------------------------------


def test_blocks_by_hand() -> None:
    packer = SplitPacker(packing_of(4, blocks=5))
    packer.feed(np.array([11, 12, 13, 21, 31, 32, 33, 34, 35]), np.array([3, 1, 0, 5]))
    assert packer.blocks_ready == 3
    packer.pad_out()
    input_ids, doc_ids = packer.pop(5)
    assert input_ids.tolist() == [
        [11, 12, 13, EOS],
        [21, EOS, EOS, 31],
        [32, 33, 34, 35],
        [EOS, PAD, PAD, PAD],
        [PAD] * 4,
    ]
    assert doc_ids.tolist() == [[0] * 4, [0, 0, 1, 2], [0] * 4, [0] * 4, [0] * 4]
    assert (packer.padded_tokens, packer.dropped_tokens, packer.blocks_left, packer.blocks_ready) == (7, 0, 0, 0)


def test_padding_keeps_the_number_of_the_document_before() -> None:
    packer = SplitPacker(packing_of(6, blocks=1))
    packer.feed(np.array([5, 6]), np.array([1, 1]))
    packer.pad_out()
    assert taken(packer.pop(1)) == [([5, EOS, 6, EOS, PAD, PAD], [0, 0, 1, 1, 1, 1])]


@settings(deadline=None, max_examples=100)
@given(cases(), st.data())
def test_any_way_of_feeding_gives_the_same_blocks_and_cursors(case: Case, data: st.DataObject) -> None:
    packer, got = SplitPacker(case.packing), []
    sizes = itertools.cycle(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))

    def take(count: int) -> None:
        got.extend(taken(packer.pop(count)))
        assert packer.cursor() == reference_cursor(case.documents, case.size, len(got))

    for part in in_parts(case.documents, sizes):
        feed(packer, part)
        feed(packer, Documents([], []))
        take(data.draw(st.integers(0, packer.blocks_ready)))
    packer.pad_out()
    assert packer.blocks_ready == packer.blocks_left
    while packer.blocks_left:
        take(data.draw(st.integers(1, packer.blocks_ready)))
    assert got == case.blocks
    budget = case.size * case.count
    assert packer.padded_tokens == max(0, budget - case.documents.total)
    assert packer.dropped_tokens == max(0, case.documents.total - budget)
    # What was fed with the document that the last block cuts; nothing if it cuts none.
    assert (packer.buffered_tokens > 0) == (case.documents.total > budget and packer.cursor().offset > 0)


@settings(deadline=None, max_examples=100)
@given(cases(), st.integers(1, 4))
def test_one_that_wants_no_tokens_needs_none(case: Case, at_once: int) -> None:
    assert rest_of(SplitPacker(case.packing), case.documents, at_once) == case.blocks


@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int32, np.uint64])
def test_tokens_of_any_integer_type(dtype: Any) -> None:
    packer = SplitPacker(packing_of(3, blocks=1))
    feed(packer, Documents([0], [[7, 100]]), dtype=dtype)
    assert taken(packer.pop(1)) == [([7, 100, EOS], [0, 0, 0])]


@pytest.mark.parametrize("blocks", [3, 9])  # all documents are kept as they came, or the last one is cut
def test_blocks_are_the_callers_own(blocks: int) -> None:
    tokens, lengths, positions = np.arange(1, 7), np.array([6]), np.array([0])
    packer = SplitPacker(packing_of(2, blocks))
    packer.feed(tokens, lengths, positions)
    tokens[:], lengths[:], positions[:] = 99, 99, 99
    first = packer.pop(1)
    for array in first:
        array[:] = 77
    assert packer.cursor() == SplitCursor(documents=0, offset=2, blocks=1)
    assert taken(packer.pop(2)) == [([3, 4], [0, 0]), ([5, 6], [0, 0])]


def test_what_lies_beyond_the_epoch_is_not_held() -> None:
    packer = SplitPacker(packing_of(4, blocks=2))
    for _ in range(100):
        packer.feed(np.ones(50, dtype=np.int64), np.array([5] * 10))
    assert packer.tokens_wanted == 0
    assert packer.buffered_tokens == 12, "two documents of six tokens: the second is cut by the last block"
    assert packer.dropped_tokens == 100 * 60 - 8
    packer.pop(2)
    assert packer.cursor() == SplitCursor(documents=1, offset=2, blocks=2)


# --- resuming -------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=40)
@given(cases(), st.integers(1, 3))
def test_a_cursor_after_any_block_continues_bit_for_bit(case: Case, at_once: int) -> None:
    for blocks, packer in stops(case):
        saved = json.loads(json.dumps(cursors_to_json([packer.cursor()])))
        assert saved["pack_tokens"] == {}
        (cursor,) = cursors_from_json(saved, 1)
        assert cursor == packer.cursor() == reference_cursor(case.documents, case.size, blocks)
        assert SplitPacker(case.packing, cursor).cursor() == cursor, "also before it was fed anything"
        assert rest_of(SplitPacker(case.packing, cursor), case.documents, at_once) == case.blocks[blocks:]
        again = [other.cursor() for _, other in stops(case, cursor, at_once)]
        assert again == [reference_cursor(case.documents, case.size, b) for b in range(blocks, case.count + 1)]


@pytest.mark.thorough
@settings(deadline=None, max_examples=20)
@given(cases(), st.integers(1, 3))
def test_the_form_of_lancedb_continues_bit_for_bit(case: Case, at_once: int) -> None:
    """And again from any state taken after that, while its tokens last and when they are gone."""
    for blocks, packer in stops(case):
        theirs = json.loads(json.dumps(cursors_to_lancedb([packer.place().buffered()])))
        (cursor,) = cursors_from_lancedb(theirs, 1)
        assert cursor.offset == 0
        for later, other in stops(case, cursor, at_once):
            saved = json.loads(json.dumps(cursors_to_json([other.cursor()])))
            (resumed,) = cursors_from_json(saved, 1)
            assert rest_of(SplitPacker(case.packing, resumed), case.documents, at_once) == case.blocks[later:]
            again = json.loads(json.dumps(cursors_to_lancedb([other.place().buffered()])))
            (resumed,) = cursors_from_lancedb(again, 1)
            assert rest_of(SplitPacker(case.packing, resumed), case.documents, at_once) == case.blocks[later:]
            if (later - blocks) * case.size >= len(cursor.buffer.tokens):
                assert other.cursor() == reference_cursor(case.documents, case.size, later), "no tokens any more"


@settings(deadline=None, max_examples=100)
@given(cases(), st.data())
def test_a_buffer_of_several_documents(case: Case, data: st.DataObject) -> None:
    """LanceDB fills all splits before it gives a block of the first: a buffer may hold documents' starts."""
    read = data.draw(st.integers(0, len(case.documents.tokens)))
    pulled = Documents(case.documents.positions[:read], case.documents.tokens[:read])
    tokens = [token for document in pulled.tokens for token in [*document, EOS]]
    ends = list(itertools.accumulate(len(document) + 1 for document in pulled.tokens))
    given_blocks = data.draw(st.integers(0, min(len(tokens) // case.size, case.count)))
    head = given_blocks * case.size
    starts = [start - head for start in [0, *ends][:read] if start >= head]
    state = {
        "samples_consumed_per_split": [pulled.positions[-1] + 1 if read else 0],
        "blocks_emitted_per_split": [given_blocks],
        "pack_buffers": {0: {"tokens": tokens[head:], "starts": starts}},
    }
    (cursor,) = cursors_from_lancedb(state, 1)
    assert cursors_to_lancedb([SplitPacker(case.packing, cursor).place().buffered()]) == state
    for later, packer in stops(case, cursor):
        (resumed,) = cursors_from_json(json.loads(json.dumps(cursors_to_json([packer.cursor()]))), 1)
        assert rest_of(SplitPacker(case.packing, resumed), case.documents) == case.blocks[later:]


def test_a_skipped_document_does_not_shift_the_cursor() -> None:
    """It is not known before the next one comes: the cursor must not depend on that."""
    packer = SplitPacker(packing_of(2, blocks=9))
    packer.feed(np.array([1]), np.array([1]), np.array([3]))
    packer.pop(1)
    assert packer.cursor() == SplitCursor(documents=4, blocks=1)
    packer.feed(np.array([2]), np.array([1]), np.array([7]))
    assert packer.cursor() == SplitCursor(documents=4, blocks=1)
    packer.pop(1)
    assert packer.cursor() == SplitCursor(documents=8, blocks=2)


# --- side by side with LanceDB -----------------------------------------------------------------------------

SIZE = 16


class Corpus:
    """A table of token lists, and the same documents as the splits of its unshuffled order have them."""

    def __init__(self, path: Path, tokens: list[list[int] | None], num_splits: int) -> None:
        rows = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32()))})
        self.table = lancedb.connect(str(path)).create_table("docs", rows)
        self.num_splits = num_splits
        length = len(tokens) // num_splits
        self.splits = [
            Documents(
                [i for i, document in enumerate(part) if document is not None],
                [document for document in part if document is not None],
            )
            for part in (tokens[s * length : (s + 1) * length] for s in range(num_splits))
        ]

    def theirs(self, blocks: int | str, **options: Any) -> Any:
        """Returns LanceDB's dataset; ``blocks`` per split."""
        return StreamingDataset(
            self.table,
            num_splits=self.num_splits,
            shuffle=False,
            columns=["tokens"],
            pack_sequences=SIZE,
            eos_id=EOS,
            pad_id=PAD,
            blocks_per_epoch=blocks * self.num_splits if isinstance(blocks, int) else blocks,
            on_transform_error="skip",
            transform_parallelism=1,
            io_queue_depth=1,
            **options,
        )

    def packers(self, blocks: int, cursors: list[SplitCursor] | None = None) -> list[SplitPacker]:
        packing = packing_of(SIZE, blocks, self.num_splits)
        return [SplitPacker(packing, cursor) for cursor in cursors or [SplitCursor()] * self.num_splits]

    def steps(self, packers: list[SplitPacker]) -> Iterator[list[Block]]:
        """Yields the blocks of one cycle after the other."""
        sources = [
            in_parts(documents.after(packer.cursor().documents), itertools.repeat(3))
            for packer, documents in zip(packers, self.splits, strict=True)
        ]
        while packers[0].blocks_left:
            for packer, source in zip(packers, sources, strict=True):
                while not packer.blocks_ready:
                    part = next(source, None)
                    packer.pad_out() if part is None else feed(packer, part)
            yield [taken(packer.pop(1))[0] for packer in packers]


def drained(dataset: Any) -> list[Block]:
    return [(block["input_ids"].tolist(), block["doc_ids"].tolist()) for block in dataset]


def state_for_lancedb(packers: list[SplitPacker], blocks: int) -> dict[str, Any]:
    fixed = {"shuffle_seed": 0, "epoch": 0, "pack_sequences": SIZE, "eos_id": EOS, "pad_id": PAD}
    sizes = {"num_splits": len(packers), "blocks_per_epoch": blocks * len(packers)}
    return fixed | sizes | cursors_to_lancedb([packer.place().buffered() for packer in packers])


def corpus_of(path: Path, num_splits: int, rows: int, *, nulls: bool = False) -> Corpus:
    draw = np.random.default_rng(rows)
    lengths = draw.integers(0, 51, rows)
    lengths[: num_splits + 1] = 0, *[50] * num_splits
    tokens: list[list[int] | None] = [draw.integers(1, 1000, length).tolist() for length in lengths]
    if nulls:
        tokens = [None if draw.random() < 0.3 else document for document in tokens]
        tokens[-1] = None
    return Corpus(path, tokens, num_splits)


# Splits, rows, blocks per split, whether documents fail, whether splits run dry.
SIDE_BY_SIDE = [(2, 13, 13, False, {True}), (3, 20, 6, False, {False}), (4, 28, 8, True, {True, False})]


@pytest.mark.thorough
@pytest.mark.parametrize(("num_splits", "rows", "blocks", "nulls", "runs_dry"), SIDE_BY_SIDE)
def test_side_by_side_with_lancedb(
    tmp_path: Path, num_splits: int, rows: int, blocks: int, nulls: bool, runs_dry: set[bool]
) -> None:
    """At every step: the same blocks and the same state; theirs continues in ours, ours in theirs."""
    corpus = corpus_of(tmp_path, num_splits, rows, nulls=nulls)
    theirs = corpus.theirs(blocks)
    stream = iter(theirs)
    packers = corpus.packers(blocks)
    steps = corpus.steps(packers)
    expected = [block for step in corpus.steps(corpus.packers(blocks)) for block in step]
    assert len(expected) == blocks * num_splits
    assert {documents.total < blocks * SIZE for documents in corpus.splits} == runs_dry
    for done in range(1, blocks + 1):
        got = [next(stream) for _ in range(num_splits)]
        assert next(steps) == drained(got) == expected[(done - 1) * num_splits : done * num_splits]
        state = theirs.state_dict()
        assert state_for_lancedb(packers, blocks) == state

        for loaded in (state, json.loads(json.dumps(state))):
            ours = corpus.packers(blocks, cursors_from_lancedb(loaded, num_splits))
            assert [block for step in corpus.steps(ours) for block in step] == expected[done * num_splits :]

        (resumed := corpus.theirs(blocks)).load_state_dict(json.loads(json.dumps(state_for_lancedb(packers, blocks))))
        assert drained(resumed) == expected[done * num_splits :]
    assert next(stream, None) is None


@pytest.mark.thorough
def test_a_state_of_theirs_loaded_in_ours_goes_back_to_theirs(tmp_path: Path) -> None:
    """Also while tokens of the loaded buffer are left: a document of ten blocks."""
    corpus = Corpus(tmp_path, [list(range(1, 200)), [5] * 9, [6] * 300, [7]], 2)
    theirs, blocks = corpus.theirs(15), 15
    expected = drained(corpus.theirs(blocks))
    stream = iter(theirs)
    first = [next(stream) for _ in range(4)]
    packers = corpus.packers(blocks, cursors_from_lancedb(theirs.state_dict(), 2))
    got = drained(first)
    for step in corpus.steps(packers):
        got += step
        (resumed := corpus.theirs(blocks)).load_state_dict(state_for_lancedb(packers, blocks))
        assert got + drained(resumed) == expected
    assert got == expected


def test_the_states_of_ranks_merge_as_theirs_do(tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, 4, 28)
    blocks = 6
    ranks = [corpus.theirs(blocks, rank=rank, world_size=2) for rank in range(2)]
    streams = [iter(rank) for rank in ranks]
    for _ in range(3 * 2):
        for stream in streams:
            next(stream)
    states = [rank.state_dict() for rank in ranks]
    merged = merge_cursors([cursors_from_lancedb(state, 4) for state in states])
    assert merged == cursors_from_lancedb(StreamingDataset.merge_state_dicts(states), 4)
    expected = list(corpus.steps(corpus.packers(blocks)))
    assert list(corpus.steps(corpus.packers(blocks, merged))) == expected[3:]
    next(streams[0])
    next(streams[0])
    with pytest.raises(StateError, match=r"different numbers of blocks.*Found: 3, 4"):
        merge_cursors([cursors_from_lancedb(rank.state_dict(), 4) for rank in ranks])
    for stream in streams:
        stream.close()


@pytest.mark.parametrize(("num_splits", "rows", "seed"), [(1, 1, 0), (2, 450, 0), (3, 1000, 77), (3, 1000, 2**63)])
def test_the_estimate_is_lancedbs(tmp_path: Path, num_splits: int, rows: int, seed: int) -> None:
    lengths = np.random.default_rng(rows).integers(0, 51, rows)
    corpus = Corpus(tmp_path, [[1] * int(length) for length in lengths], num_splits)
    with pytest.warns(UserWarning, match="approximate"):
        theirs = corpus.theirs("auto", shuffle_seed=seed).state_dict()["blocks_per_epoch"]
    length = rows // num_splits
    sample = sample_positions(shuffle_seed=seed, num_splits=num_splits, rows_per_split=length)
    assert [len(positions) for positions in sample] == [-(-length // 100)] * num_splits
    read = np.concatenate([lengths[split * length + positions] for split, positions in enumerate(sample)])
    ours = estimate_blocks(read, pack_sequences=SIZE, num_splits=num_splits, rows_per_split=length)
    assert (ours.blocks, ours.sampled_documents) == (theirs, len(read))


# --- how many blocks ----------------------------------------------------------------------------------------


def test_the_sample_is_bounded_and_in_order() -> None:
    sample = sample_positions(shuffle_seed=3, num_splits=40, rows_per_split=400_000)
    assert [len(positions) for positions in sample] == [2500] * 40, "100,000 in all, not a hundredth"
    for positions in sample:
        assert (np.diff(positions) > 0).all() and positions[0] >= 0 and positions[-1] < 400_000
    assert not np.array_equal(sample[0], sample[1])
    tiny = sample_positions(shuffle_seed=3, num_splits=100_001, rows_per_split=3)
    assert {len(positions) for positions in tiny} == {1}
    with pytest.raises(ConfigError, match="rows_per_split"):
        sample_positions(shuffle_seed=3, num_splits=4, rows_per_split=0)


def test_exact_blocks() -> None:
    lengths = [np.array([9, 0, 25]), np.array([3, 3, 3])]  # 37 and 12 tokens with their separators
    count = exact_blocks(lengths, pack_sequences=10)
    assert (count.blocks, count.without_padding, count.without_loss) == (4, 2, 8)
    empty = exact_blocks([np.array([0]), np.array([1])], pack_sequences=10)
    assert (empty.blocks, empty.without_padding, empty.without_loss) == (2, 0, 2)


@settings(deadline=None, max_examples=40)
@given(st.lists(cases(), min_size=1, max_size=3))
def test_exact_blocks_against_the_packer(parts: list[Case]) -> None:
    size, splits = parts[0].size, [case.documents for case in parts]
    lengths = [np.array([len(tokens) for tokens in documents.tokens], dtype=np.int64) for documents in splits]
    count = exact_blocks(lengths, pack_sequences=size)
    for blocks, padded, lost in ((count.without_padding, False, None), (count.without_loss, None, False)):
        assert blocks % len(splits) == 0
        if not blocks:
            continue
        packers = [SplitPacker(packing_of(size, blocks // len(splits))) for _ in splits]
        for packer, documents in zip(packers, splits, strict=True):
            feed(packer, documents)
            packer.pad_out()
            packer.pop(packer.blocks_left)
        assert padded is None or any(packer.padded_tokens for packer in packers) == padded
        assert lost is None or any(packer.dropped_tokens for packer in packers) == lost


def test_the_standard_error_says_how_far_the_estimate_is_off() -> None:
    draw = np.random.default_rng(5)
    splits, rows, size = 4, 5000, 128
    lengths = draw.lognormal(5, 1, (splits, rows)).astype(np.int64)
    exact = exact_blocks(list(lengths), pack_sequences=size).blocks
    off = []
    for seed in range(60):
        sample = sample_positions(shuffle_seed=seed, num_splits=splits, rows_per_split=rows)
        read = np.concatenate([lengths[split, positions] for split, positions in enumerate(sample)])
        estimate = estimate_blocks(read, pack_sequences=size, num_splits=splits, rows_per_split=rows)
        off.append((estimate.blocks - exact) / estimate.standard_error)
    spread = float(np.std(off))
    assert 0.75 < spread < 1.35, "about one standard error"
    # Of all documents nothing is unknown; of one, nothing is known of the others.
    whole = estimate_blocks(lengths.reshape(-1), pack_sequences=size, num_splits=splits, rows_per_split=rows)
    assert (whole.blocks, whole.standard_error) == (exact, 0.0)
    single = estimate_blocks(np.array([9]), pack_sequences=5, num_splits=1, rows_per_split=3)
    assert (single.blocks, single.standard_error) == (6, float("inf"))
    with pytest.raises(ValueError, match="a sample of 0"):
        estimate_blocks(np.array([]), pack_sequences=5, num_splits=1, rows_per_split=3)


# --- what is refused ------------------------------------------------------------------------------------------

VALID: dict[str, Any] = {"pack_sequences": 16, "eos_id": 0, "pad_id": 0, "blocks_per_epoch": 8, "num_splits": 4}


def test_parameters_that_work() -> None:
    made = Packing.of(**VALID)
    assert made is not None and made.blocks_per_split == 2
    assert Packing.of(**VALID | {"blocks_per_epoch": "auto", "pad_id": -100, "pack_sequences": 1}) is not None
    assert Packing.of(num_splits=4) is None
    assert Packing.of(num_splits=4, eos_id=3, pad_id=None) is None, "ignored without pack_sequences"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("pack_sequences", value) for value in (0, -1, True, 1.5, "16")],
        *[(name, value) for name in ("eos_id", "pad_id") for value in (None, True, 1.0, "0", 2**63)],
        *[("blocks_per_epoch", value) for value in (None, 0, -4, True, 8.0, "all", 2, 9)],
        *[("num_splits", value) for value in (0, None)],
    ],
)
def test_parameters_that_cannot_work(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*Found: .*Expected: .*Remedy: "):
        Packing.of(**VALID | {name: value})


def test_blocks_per_epoch_without_packing() -> None:
    for blocks in (8, "auto"):
        with pytest.raises(ConfigError, match="blocks_per_epoch requires pack_sequences"):
            Packing.of(num_splits=4, blocks_per_epoch=blocks)
    with pytest.raises(ConfigError, match="pass 8 or 12"):
        Packing.of(**VALID | {"blocks_per_epoch": 9})
    with pytest.raises(ConfigError, match="pass 4"):
        Packing.of(**VALID | {"blocks_per_epoch": 3})
    auto = Packing.of(**VALID | {"blocks_per_epoch": "auto"})
    assert auto is not None
    with pytest.raises(ValueError, match="still to be estimated"):
        SplitPacker(auto)


@pytest.mark.filterwarnings("ignore:blocks_per_epoch='auto'")
@pytest.mark.parametrize("value", [0, -1, True, None, 8.0, "all", 2, 9, "auto", 8])
def test_lancedb_refuses_the_same_blocks_per_epoch(tmp_path: Path, value: Any) -> None:
    corpus = Corpus(tmp_path, [[1]] * 4, 4)

    def refused(make: Any) -> bool:
        try:
            make()
        except ValueError:
            return True
        return False

    options = {"columns": ["tokens"], "pack_sequences": 16, "eos_id": 0, "pad_id": 0, "blocks_per_epoch": value}
    theirs = refused(lambda: StreamingDataset(corpus.table, num_splits=4, **options))
    assert refused(lambda: Packing.of(**VALID | {"blocks_per_epoch": value})) == theirs


def test_documents_that_are_not_those_of_the_state() -> None:
    cursor = SplitCursor(documents=5, offset=3, blocks=1)
    packing = packing_of(4, blocks=3)

    def fresh() -> SplitPacker:
        return SplitPacker(packing, cursor)

    for positions, length in (([6], 9), ([5], 2)):  # it is left out now; it is shorter than it was
        with pytest.raises(StateError, match=r"not there.*position 5, of 3 or more tokens.*Remedy"):
            fresh().feed(np.ones(length, dtype=np.int64), np.array([length]), np.array(positions))
    with pytest.raises(StateError, match="the split's end"):
        fresh().pad_out()
    assert fresh().place().buffered() == cursor, "the tokens of LanceDB's form are not known yet"
    packer = fresh()
    assert packer.tokens_wanted == 3 + 2 * 4, "the document comes whole, with what earlier blocks have of it"
    packer.feed(np.array([7, 8, 9]), np.array([3]))
    assert packer.tokens_wanted == 2 * 4 - 1
    packer.pad_out()
    assert taken(packer.pop(1)) == [([EOS, PAD, PAD, PAD], [0] * 4)], "the separator alone was left"
    with pytest.raises(StateError, match=r"more blocks than the epoch.*Found: 4"):
        SplitPacker(packing, SplitCursor(blocks=4))
    done = SplitPacker(packing, SplitCursor(documents=5, offset=3, blocks=3))
    assert (done.tokens_wanted, done.blocks_ready) == (0, 0)
    done.pad_out()


def test_calls_that_are_wrong() -> None:
    def fed(tokens: Any, lengths: Any, positions: Any = None) -> None:
        packer = SplitPacker(packing_of(4, blocks=3), SplitCursor(documents=2))
        packer.feed(np.array(tokens), np.array(lengths), None if positions is None else np.array(positions))

    fed([], [])
    for lengths in ([2], [1, 1], [4, -1]):
        with pytest.raises(ValueError, match="do not agree"):
            fed([1, 2, 3], lengths)
    with pytest.raises(ValueError, match="do not agree"):
        fed([1, 2, 3], [3], [2, 3])
    for positions in ([1, 2], [3, 3], [4, 3]):
        with pytest.raises(ValueError, match="must ascend from 2"):
            fed([1, 2], [1, 1], positions)
    for tokens in ([1.5], [True], [[1]], ["a"]):
        with pytest.raises(ValueError, match="flat array of integers"):
            fed(tokens, [1])
    with pytest.raises(ValueError, match="64 bits"):
        fed(np.array([2**63], dtype=np.uint64), [1])
    packer = SplitPacker(packing_of(4, blocks=3))
    for count in (-1, 1):
        with pytest.raises(ValueError, match="0 are ready"):
            packer.pop(count)
    packer.pad_out()
    with pytest.raises(ValueError, match="4 blocks were asked for, 3 are ready"):
        packer.pop(4)
    with pytest.raises(ValueError, match="no document can follow"):
        packer.feed(np.array([1]), np.array([1]))
    with pytest.raises(ValueError, match="knows no offsets"):
        cursors_to_lancedb([SplitCursor(offset=1)])


OURS = cursors_to_json(
    [SplitCursor(documents=4, offset=2, blocks=3), SplitCursor(documents=5, blocks=3, buffer=PackBuffer((7, 8), (1,)))]
)
THEIRS = {
    "samples_consumed_per_split": [4, 5],
    "blocks_emitted_per_split": [3, 3],
    "pack_buffers": {0: {"tokens": [], "starts": []}, 1: {"tokens": [7, 8], "starts": [1]}},
}
ODD: list[Any] = [None, True, -1, 1.5, "5", [], [1], [1, 2, 3], [1, -1], [1, True], [1, "2"], [1, 2**63], {"base": 1}]
ODD_BUFFERS: list[Any] = [
    *[None, 3, [], [{}], {"1": None}, {"1": []}, {"1": {"tokens": [1]}}, {"1": {"starts": []}}],
    *[{"2": {"tokens": [], "starts": []}}, {"01": {"tokens": [], "starts": []}}, {None: {"tokens": [], "starts": []}}],
    *[{"1": {"tokens": tokens, "starts": []}} for tokens in (None, "12", [True], [1.0], [None], [2**63], [[1]])],
    *[{"1": {"tokens": [7, 8], "starts": starts}} for starts in (None, [2], [-1], [1, 1], [1, 0], [True], [0.5])],
    {1: {"tokens": [], "starts": []}, "1": {"tokens": [], "starts": []}},
]


def test_the_saved_form_is_pinned() -> None:
    """Users have files with these keys."""
    buffer = {"1": {"tokens": [7, 8], "starts": [1]}}
    counts = {"samples_consumed_per_split": [4, 5], "blocks_emitted_per_split": [3, 3]}
    assert counts | {"pack_offsets": [2, 0], "pack_tokens": buffer} == OURS
    assert cursors_to_json(cursors_from_json(OURS, 2)) == OURS
    assert cursors_to_lancedb(cursors_from_lancedb(THEIRS, 2)) == THEIRS


@pytest.mark.parametrize("key", ["samples_consumed_per_split", "pack_offsets", "blocks_emitted_per_split"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_damaged_state_of_ours_is_refused(key: str, value: Any) -> None:
    with pytest.raises(StateError, match="Remedy: "):
        cursors_from_json(OURS | {key: value}, 2)


@pytest.mark.parametrize("key", ["samples_consumed_per_split", "blocks_emitted_per_split"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_a_damaged_state_of_theirs_is_refused(key: str, value: Any) -> None:
    with pytest.raises(StateError, match="Remedy: "):
        cursors_from_lancedb(THEIRS | {key: value}, 2)


@pytest.mark.parametrize("value", ODD_BUFFERS, ids=repr)
def test_damaged_buffers_are_refused(value: Any) -> None:
    with pytest.raises(StateError, match="Remedy: "):
        cursors_from_json(OURS | {"pack_tokens": value}, 2)
    with pytest.raises(StateError, match="Remedy: "):
        cursors_from_lancedb(THEIRS | {"pack_buffers": value}, 2)


def test_things_that_are_no_packed_state() -> None:
    odd: list[Any] = [None, [], 3, "{}", {}, {"samples_consumed_per_split": [0]}]
    for value in odd:
        with pytest.raises(StateError):
            cursors_from_json(value, 1)
        with pytest.raises(StateError):
            cursors_from_lancedb(value, 1)
    with pytest.raises(StateError, match="offsets"):
        cursors_from_json(OURS | {"pack_offsets": [2, 1]}, 2)  # tokens before a document already begun
