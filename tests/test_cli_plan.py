"""``plan``: what it says of a setup is what shards of that setup do."""

from __future__ import annotations

import json
from typing import Any

import lancedb
import numpy as np
import pyarrow as pa
import pytest
from checkpoints import run
from conftest import Tables
from recording import RecordingLink

from ray_lance_stream import LanceStream, PrefetchConfig
from ray_lance_stream.shard import StreamShard
from ray_lance_stream.topology import Replica, Seat


def planned(*arguments: object) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    assert (done.exit_code, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


SETUPS: list[tuple[dict[str, Any], list[object], int | None]] = [
    ({}, [], None),
    ({"filter": "id < 41"}, ["--filter", "id < 41"], 3),
    ({"drop_last": True}, ["--drop-last"], 2),
    ({"num_splits": 5, "global_batch_size": 15}, [], 4),
    ({"num_splits": 12, "global_batch_size": 48}, [], 7),
    ({"num_splits": 1, "global_batch_size": 50}, [], 20),
]


@pytest.mark.parametrize(("options", "flags", "micro"), SETUPS)
def test_steps_and_shares_are_those_of_shards(
    tables: Tables, options: dict[str, Any], flags: list[object], micro: int | None
) -> None:
    stream = tables.stream(50, **options)
    splits, batch = stream.config.order.num_splits, stream.config.global_batch_size
    arguments = [tables.uri(50), "t", "--num-splits", splits, "--global-batch-size", batch, *flags]
    if micro is not None:
        arguments += ["--micro-batch-size", micro]
    found = planned(*arguments)
    assert found["table"] == {
        "version": stream.config.identity.version,
        "fingerprint": stream.config.identity.fingerprint,
        "rows": 50,
    }
    with stream.open() as shard:
        sizes = [len(b["id"]) for b in shard.iter_batches()]
        assert found["steps"] == {
            "global_batch_size": batch,
            "cycles_per_step": batch // splits,
            "num_steps": len(shard),
            "rows": sum(sizes),
            "last_step_rows": sizes[-1],
            "drops_last": "drop_last" in options,
        }
        assert found["dropped_rows"] == shard.dropped_rows
    for share in found["world_sizes"]:
        size = share["world_size"]
        counts, micro_rows, micro_batches = [], [], set()
        for rank in range(size):
            with stream.open(rank=rank, world_size=size) as shard:
                made = iter(shard.iter_batches(micro_batch_size=micro))
                rows = [len(next(made)["id"])]
                while not shard.is_step_end:
                    rows.append(len(next(made)["id"]))
                counts.append(sum(rows))
                micro_rows.append(max(rows))
                micro_batches.add(len(rows))
        assert share["rows"] == [min(counts), max(counts)]
        assert sum(counts) == batch
        assert {share["micro_batches"]} == micro_batches
        assert share["micro_batch_rows"] == max(micro_rows)
        assert share["balance"] == pytest.approx(batch / size / max(counts))
        assert share["share_bytes"] == pytest.approx(max(counts) * found["bytes_per_row"])
        owned = [len(Replica(dp_rank=rank, dp_size=size).owned_splits(splits)) for rank in range(size)]
        assert share["splits"] == [min(owned), max(owned)]


def test_bytes_are_measured(tables: Tables) -> None:
    arguments = (tables.uri(50), "t", "--num-splits", 4, "--global-batch-size", 8)
    found = planned(*arguments, "--columns", "id,x")
    assert found["bytes_per_row"] == 8 + 3 * 8
    assert found["bytes_per_step"] == 8 * 32
    assert planned(*arguments, "--columns", "id")["bytes_per_row"] == 8
    assert planned(*arguments)["bytes_per_row"] > 32


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("max_buffer", "block"), [(1 << 20, 1 << 18), (1 << 28, 1 << 24), (1 << 16, 1 << 24)])
def test_blocks_are_those_that_a_shard_asks_for(tables: Tables, world_size: int, max_buffer: int, block: int) -> None:
    stream = tables.stream(
        60_000,
        columns=["id", "x"],
        num_splits=6,
        global_batch_size=600,
        prefetch=PrefetchConfig(max_buffer_bytes=max_buffer, block_bytes=block),
    )
    found = planned(
        *(tables.uri(60_000), "t", "--num-splits", 6, "--global-batch-size", 600, "--world-size", world_size),
        *("--columns", "id,x", "--max-buffer-bytes", max_buffer, "--block-bytes", block),
    )["in_flight_per_worker"]
    link = RecordingLink(stream.recipe)
    rank = world_size - 1
    seat = Seat(replica=Replica(dp_rank=rank, dp_size=world_size), world_rank=rank, world_size=world_size)
    most = 0
    with StreamShard(stream.config, seat, link) as shard:
        for _ in shard.iter_batches():
            most = max(most, shard.stats().buffered_bytes)
        rows = [asked.num_splits * (asked.stop - asked.start) for asked in link.source.asked]
    assert sum(rows) == 60_000 // world_size
    assert found["block_rows"] == max(rows)
    assert found["block_bytes"] == max(rows) * 32
    assert most <= found["bytes"] <= max(max_buffer // world_size, found["block_bytes"] + 600 // world_size * 32)


def test_the_near_global_batches_work(tables: Tables) -> None:
    found = planned(tables.uri(50), "t", "--num-splits", 4, "--global-batch-size", 20)
    assert [near["global_batch_size"] for near in found["near"]] == [12, 16, 20, 24, 28]
    for near in found["near"]:
        with tables.stream(50, global_batch_size=near["global_batch_size"]).open() as shard:
            sizes = [len(batch["id"]) for batch in shard.iter_batches()]
        assert (near["num_steps"], near["last_step_rows"]) == (len(sizes), sizes[-1])
    whole = planned(tables.uri(120), "t", "--num-splits", 4, "--global-batch-size", 80, "--drop-last")
    assert [near["global_batch_size"] for near in whole["near"]] == [60, 72, 76, 80, 84, 88, 120]


def test_a_filter_without_enough_rows(tables: Tables) -> None:
    done = run("plan", tables.uri(50), "t", "--num-splits", 4, "--global-batch-size", 8, "--filter", "id < 3")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "fewer rows than splits. Found: 3 rows (after the filter)" in done.stderr


def test_a_version_of_before(tables: Tables) -> None:
    uri, table = tables.own(50)
    table.delete("id < 10")
    assert planned(uri, "t", "--num-splits", 4, "--global-batch-size", 8)["rows"] == 40
    old = planned(uri, "t", "--num-splits", 4, "--global-batch-size", 8, "--version", 2)
    assert (old["rows"], old["table"]["version"]) == (50, 2)


def test_the_text(tmp_path: Any) -> None:
    rows = {"id": np.arange(1003), "x": np.zeros(1003)}
    lancedb.connect(str(tmp_path)).create_table("digits", pa.table(rows))
    done = run(
        *("plan", tmp_path, "digits", "--num-splits", 10, "--global-batch-size", 40, "--world-size", 4),
        *("--micro-batch-size", 5, "--filter", "id != 7"),
    )
    assert done.stdout.splitlines() == [
        "digits, version 1: 1,003 rows",
        "",
        "  filter         1,002 rows satisfy id != 7",
        "  epoch          1,000 rows: 100 in each of 10 splits",
        "  left out       2 rows of every epoch",
        "  steps          25 of 40 rows (4 cycles)",
        "  shares         4 replicas with 2-3 splits each: 8-12 rows of a step",
        "  micro-batches  3 a step, of at most 4 rows",
        "  size           16 bytes a row, 640 bytes a step, 192 bytes a replica's share",
        "  blocks         up to 4.7 KiB or 300 rows; 1 block at a time for each worker",
        "  in flight      up to 4.7 KiB for each worker, 64.0 MiB allowed (256 MiB for",
        "                 all workers)",
        "",
        "Global batches near 40, and the nearest without a short last step:",
        "",
        "     rows  cycles  steps  rows of the last step  left out",
        "       20       2     50                     20         2",
        "       30       3     34                     10         2",
        "  *    40       4     25                     40         2",
        "       50       5     20                     50         2",
        "       60       6     17                     40         2",
        "",
        "Other world sizes (the order of rows and the steps stay the same):",
        "",
        "     replicas  splits   rows  balance  micro-batches      share  may buffer",
        "            1      10     40     100%          8 x 5  640 bytes     256 MiB",
        "            2       5     20     100%          4 x 5  320 bytes     128 MiB",
        "            3     3-4  12-16      83%          4 x 4  256 bytes    85.3 MiB",
        "  *         4     2-3   8-12      83%          3 x 4  192 bytes    64.0 MiB",
        "            5       2      8     100%          2 x 4  128 bytes    51.2 MiB",
        "            6     1-2    4-8      83%          2 x 4  128 bytes    42.7 MiB",
        "            8     1-2    4-8      62%          2 x 4  128 bytes    32.0 MiB",
    ]


def test_what_a_trainer_needs(tables: Tables) -> None:
    arguments = (tables.uri(60_000), "t", "--num-splits", 16, "--global-batch-size", 64, "--world-size", 3)
    assert planned(*arguments)["demand"] is None
    speeds = ("--step-time-s", 0.05, "--transform-time-ms-per-row", 1.5, "--read-latency-ms", 40)
    found = planned(*arguments, "--columns", "id,x", *speeds, "--read-mib-per-s", 100)
    need = found["demand"]
    assert need["rows_per_s"] == pytest.approx(64 / 0.05)
    assert need["bytes_per_s"] == pytest.approx(64 / 0.05 * 32)
    # The transform of rows this small is what takes long: two blocks at once do not make it faster.
    assert need["prefetcher_rows_per_s"] == pytest.approx(1 / 0.0015)
    assert need["block_s"] == pytest.approx(0.04 + need["block_rows"] * (32 / (100 * 2**20) + 0.0015))
    assert need["prefetchers"] == need["prefetch"]["num_actors"] == 3  # 1,280 / 667 / 0.8 = 2.4
    assert need["max_buffer_bytes"] <= need["prefetch"]["max_buffer_bytes"] < need["max_buffer_bytes"] + 2**20
    PrefetchConfig(**need["prefetch"])
    unknown = planned(*arguments, "--step-time-s", 1, "--read-latency-ms", 40)["demand"]
    assert unknown["prefetch"]["block_bytes"] == PrefetchConfig().block_bytes
    none = planned(*arguments, "--step-time-s", 1)["demand"]  # an infinite speed is null in JSON
    assert (none["prefetcher_rows_per_s"], none["prefetchers"]) == (None, 1)
    given = planned(*arguments, "--columns", "id,x", *speeds, "--block-bytes", 4096)["demand"]
    assert given["prefetch"]["block_bytes"] == 4096 and given["block_rows"] * 32 <= 4096


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--global-batch-size", 8, "--step-time-s", 0), "step_time_s is not valid"),
        (("--global-batch-size", 8, "--step-time-s", 1, "--transform-time-ms-per-row", 1e300), "at most 86400 (a day)"),
        (("--global-batch-size", 8, "--read-latency-ms", 40), "--step-time-s is missing"),
        (("--global-batch-size", 8, "--step-time-s", 1, "--read-mib-per-s", -1), "read_bytes_per_s is not valid"),
        (("--global-batch-size", 10), "pass 8 or 12"),
        (("--global-batch-size", 8, "--world-size", 5), "1 to 4 replicas"),
        (("--global-batch-size", 8, "--world-size", 0), "dp_size is not valid"),
        (("--global-batch-size", 8, "--world-size", 3, "--micro-batch-size", 1), "pass micro_batch_size=2 or more"),
        (("--global-batch-size", 8, "--shuffle-clump-size", 0), "shuffle_clump_size is not valid"),
        (("--global-batch-size", 8, "--max-buffer-bytes", 0), "max_buffer_bytes is not valid"),
        (("--global-batch-size", 8, "--columns", "idd"), "did you mean 'id'"),
        (("--global-batch-size", 64, "--drop-last"), "drop_last leaves no step"),
    ],
)
def test_mistakes(tables: Tables, options: tuple[object, ...], named: str) -> None:
    done = run("plan", tables.uri(50), "t", "--num-splits", 4, *options)
    assert (done.exit_code, done.stdout) == (2, "")
    assert named in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_mistake_for_other_world_sizes_is_told_in_the_table(tables: Tables) -> None:
    arguments = ("plan", tables.uri(50), "t", "--num-splits", 4, "--global-batch-size", 4, "--micro-batch-size", 1)
    done = run(*arguments, columns=120)
    assert done.exit_code == 0
    assert [line.split()[1] for line in done.stdout.splitlines() if "  too small  " in line] == ["1-2"]
    assert "Too small: micro_batch_size is too small for the splits a replica owns" in done.stdout


def test_it_is_refused_where_a_stream_is(tables: Tables) -> None:
    """The same sentence as LanceStream's, so that a plan that works is a stream that works."""
    with pytest.raises(ValueError) as error:
        LanceStream(tables.uri(50), "t", num_splits=60, global_batch_size=60)
    done = run("plan", tables.uri(50), "t", "--num-splits", 60, "--global-batch-size", 60)
    said = str(error.value).partition(" That is so in version")[0]
    assert done.stderr == f"ray-lance-stream: {said}\n"
