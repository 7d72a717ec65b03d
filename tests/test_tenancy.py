"""Two runs in one Ray, alike in everything: the table, the stream's name, the settings. They share nothing."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Tables
from loops import ids_of, until_told
from runs import delivered, fit, is_running, named_actors, read_log, reference, wait_until

from ray_lance_stream import LanceStream, PrefetchConfig

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("one_node")]
NUM_CPUS = 6
ROWS = 60
PREFETCH = PrefetchConfig(num_actors=1, placement_timeout_s=120, block_bytes=512, max_buffer_bytes=1024)


def made(tables: Tables, **options: Any) -> LanceStream:
    return tables.stream(ROWS, prefetch=PREFETCH, **options)


def pids(shard: Any) -> set[int]:
    """The processes of a shard's actors."""
    session = shard.link.session
    control = ray.get([session.coordinator.pid.remote(), session.manager.pid.remote()])
    return {*control, *(pid for _, pid in ray.get(session.coordinator.prefetchers.remote()))}


def test_two_streams_of_one_table_and_name_share_no_actor_and_end_apart(tables: Tables) -> None:
    one, two = made(tables), made(tables)
    expected = [ids for _, ids in sorted(reference(one, 2).items())]
    first, second = one.open(name="train"), two.open(name="train")
    third = two.open(name="train")  # one recipe may be in use twice
    shards: list[Any] = [first, second, third]
    assert len(set.union(*map(pids, shards))) == 9, "a coordinator, a manager and a prefetcher each"
    assert not set(named_actors(one)) & set(named_actors(two))
    assert (len(named_actors(one)), len(named_actors(two))) == (2, 4)
    assert len({shard.link.session.session_id for shard in shards}) == 3
    assert len(one.where()) == 1 and len(two.where()) == 2

    iterators = [iter(shard) for shard in shards]
    found: list[list[list[int]]] = [[], [], []]
    for _ in range(2):
        for place, iterator in enumerate(iterators):
            found[place].append(ids_of(next(iterator)))
    before = pids(second)
    third.close()
    one.close()
    wait_until(lambda: not named_actors(one) and len(named_actors(two)) == 2, 30, "the others have ended")
    assert pids(second) == before and all(map(is_running, before))
    found[1] += [ids_of(batch) for batch in iterators[1]]
    found[1] += [ids_of(batch) for batch in second]
    assert found[1] == expected
    assert [found[0], found[2]] == [expected[:2]] * 2
    assert second.stats().retries == 0
    second.close()
    wait_until(lambda: not named_actors(two), 30, "nothing is left")
    first.close()


@pytest.mark.fault
@pytest.mark.timeout(300)
def test_two_runs_at_once_are_exact_and_one_outlives_the_end_of_the_other(tables: Tables, tmp_path: Path) -> None:
    """The same table, key in ``datasets``, and name of the run; only where they store differs."""
    streams = {name: made(tables) for name in ("short", "long")}
    errors: list[BaseException] = []
    ended: dict[str, float] = {}

    def run(name: str) -> None:
        try:
            fit(until_told, {"train": streams[name]}, 2, tmp_path / name, step_s=0.05, report_every=3)
        except BaseException as error:
            errors.append(error)
        streams[name].close()
        ended[name] = time.monotonic()

    (tmp_path / "short" / "log").mkdir(parents=True)
    (tmp_path / "short" / "log" / "last").write_text("1")
    threads = {name: threading.Thread(target=run, args=[name]) for name in streams}
    for thread in threads.values():
        thread.start()
    wait_until(lambda: len(read_log(tmp_path / "long")) > 2, 120, "the long one trains")
    actors = set(named_actors(streams["long"]))
    threads["short"].join()
    steps = len(read_log(tmp_path / "long"))
    wait_until(lambda: len(read_log(tmp_path / "long")) > steps + 8 or bool(errors), 60, "the long one goes on")
    assert set(named_actors(streams["long"])) == actors and named_actors(streams["short"]) == []
    epochs = max(entry["at"][0] for entry in read_log(tmp_path / "long") if "at" in entry)
    (tmp_path / "long" / "log" / "last").write_text(str(epochs + 2))  # none of its workers is there yet
    threads["long"].join()
    assert not errors and ended["short"] < ended["long"]
    for name, stream in streams.items():
        entries = read_log(tmp_path / name)
        assert sum("start" in entry for entry in entries) == 2, "no worker was started twice"
        found = delivered(entries)
        assert found == reference(stream, 1 + max(epoch for epoch, _ in found))
