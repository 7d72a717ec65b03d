"""cluster/source.py and cluster/prefetcher.py without a cluster: Ray's calls are answered by small objects."""

from __future__ import annotations

import functools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from conftest import Tables
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    ObjectLostError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)
from runs import wait_until

from ray_lance_stream.block import BlockRecipe
from ray_lance_stream.cluster import coordination as coordination_module
from ray_lance_stream.cluster import meter as meter_module
from ray_lance_stream.cluster import reports as reports_module
from ray_lance_stream.cluster import requests as requests_module
from ray_lance_stream.cluster import source as source_module
from ray_lance_stream.cluster.coordination import Coordination
from ray_lance_stream.cluster.cuts import halves
from ray_lance_stream.cluster.examiner import Findings
from ray_lance_stream.cluster.prefetcher import Prefetcher
from ray_lance_stream.cluster.reports import PoolView
from ray_lance_stream.cluster.source import RaySource
from ray_lance_stream.errors import (
    BlockError,
    PlacementError,
    StaleIncarnationError,
    StreamClosedError,
    TableVersionError,
    TransformError,
)
from ray_lance_stream.location import TableRef
from ray_lance_stream.plan import OrderSpec, PlanSpec, TableIdentity
from ray_lance_stream.request import PlanHandle, Ranges
from ray_lance_stream.sifting import SkippedRow, Whole

RANGES = Ranges(first_split=0, num_splits=4, start=0, stop=1)
UNAVAILABLE = ActorUnavailableError("", bytes(16))


class Ref(Future[Any]):
    """Stands for an ObjectRef: a call that is answered by whoever holds it."""

    def future(self) -> Future[Any]:
        return self


class Method:
    """A remote method; ``answer`` says what, raises, or returns a Ref to be answered later."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer
        self.calls: list[tuple[Any, ...]] = []

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *args: Any) -> Ref:
        self.calls.append(args)
        ref = Ref()
        try:
            value = self.answer(*args)
        except BaseException as error:
            ref.set_exception(error)
        else:
            if isinstance(value, Ref):
                return value
            ref.set_result(value)
        return ref


class Actor:
    """A prefetcher that answers when told to."""

    def __init__(self, name: str) -> None:
        self._actor_id = name.encode()
        self.refs: list[Ref] = []
        self.build = Method(lambda *_: self.refs.append(Ref()) or self.refs[-1])  # type: ignore[func-returns-value]
        self.process = 1
        self.ready = Method(lambda: (name, self.process))


class Cluster:
    """A coordinator, its prefetchers, and what ``source.py`` asks of Ray."""

    def __init__(self, actors: int = 2) -> None:
        self.actors = [Actor(str(index)) for index in range(actors)]
        self.pool = Method(lambda: list(self.actors))
        self.ensure = Method(self.plan)
        self.examine = Method(lambda *_: Findings())
        self.report = Method(lambda *_: PoolView(life="1", members=list(self.actors)))
        self.now, self.initialized = 100.0, True
        self.cancelled: list[Ref] = []
        self.lists = 0

    def plan(self, spec: PlanSpec, lost: Any = None) -> PlanHandle:
        self.lists += lost is not None or not self.lists
        rows = f"rows {self.lists}" if spec.order.filter else None
        return PlanHandle(spec=spec, num_rows=40, matching_rows=rows, schema=pa.schema([]), bytes_per_row=10.0)

    def wait(self, refs: list[Ref], timeout: float) -> tuple[list[Any], list[Any]]:
        done, rest = wait(refs, timeout)
        return list(done), list(rest)

    def get(self, ref: Ref) -> Any:
        return ref.result()

    def cancel(self, ref: Ref) -> None:
        self.cancelled.append(ref)  # the real one starts Ray where there is none

    def is_initialized(self) -> bool:
        return self.initialized

    def source(self) -> RaySource:
        return RaySource(self, 1, retry_window_s=60.0)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster()
    for name in ("wait", "get", "cancel", "is_initialized"):
        monkeypatch.setattr(f"ray.{name}", getattr(cluster, name))
    for module in (source_module, requests_module, coordination_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: cluster.now))
    monkeypatch.setattr(coordination_module, "_POLL_S", 0.05)
    yield cluster


def spec(epoch: int = 0, filter: str | None = None) -> PlanSpec:
    table = TableIdentity(version=1, fingerprint="f")
    return PlanSpec(table=table, order=OrderSpec(num_splits=4, filter=filter), epoch=epoch)


def in_task(cause: Exception) -> RayTaskError:
    error: Any = RayTaskError  # untyped
    wrapped: RayTaskError = error("build", "traceback", cause)
    return wrapped


def lost() -> ObjectLostError:
    return ObjectLostError("00", None, "")


def asked(cluster: Cluster) -> list[int]:
    return [len(actor.refs) for actor in cluster.actors]


# --- whom it asks ------------------------------------------------------------------------------------------


def test_many_consumers_begin_with_different_prefetchers_and_leave_the_users_random_numbers(cluster: Cluster) -> None:
    state = random.getstate()
    for _ in range(60):
        source = cluster.source()
        source.request(source.plan(spec()), RANGES)
    assert min(asked(cluster)) >= 10
    assert random.getstate() == state


def test_the_prefetcher_with_fewer_open_requests_is_asked(cluster: Cluster) -> None:
    source = cluster.source()
    for _ in range(6):
        source.request(source.plan(spec()), RANGES)
    assert asked(cluster) == [3, 3]
    for ref in cluster.actors[1].refs:
        ref.set_result("block")
    for _ in range(3):
        source.request(source.plan(spec()), RANGES)
    assert asked(cluster) == [3, 6]


@pytest.mark.parametrize("error", [ActorDiedError(), UNAVAILABLE, lost(), WorkerCrashedError()])
def test_a_prefetcher_that_fails_is_passed_over_for_longer_and_longer(
    cluster: Cluster, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_module, "_SUSPECTED_AFTER", 1000)  # the prefetcher is to blame, not the block
    source, (bad, good) = cluster.source(), cluster.actors
    for _ in range(6):
        source.request(source.plan(spec()), RANGES)

    def asks_bad() -> bool:
        """Whether it is asked, which has no open request where the good one has three."""
        before = len(bad.refs)
        source.request(source.plan(spec()), RANGES)
        if len(bad.refs) == before:
            good.refs[-1].set_result("block")
        return len(bad.refs) > before

    def fail_open() -> None:
        for ref in bad.refs:
            if not ref.done():
                ref.set_exception(error)

    for pause_s in (2, 4, 8, 16, 32, 60, 60):
        fail_open()  # three together, at first, count once
        cluster.now += pause_s * 0.9
        assert not asks_bad()
        cluster.now += pause_s * 0.2
        assert asks_bad()
    bad.refs[-1].set_result("block")
    assert asks_bad()
    fail_open()
    assert not asks_bad()
    cluster.now += 2.1
    assert asks_bad()


@pytest.mark.parametrize("error", [in_task(OSError("x")), TaskCancelledError()])
def test_a_prefetcher_that_answers_with_an_error_is_not_passed_over(cluster: Cluster, error: Exception) -> None:
    source = cluster.source()
    for _ in range(4):
        source.request(source.plan(spec()), RANGES)
    for ref in cluster.actors[0].refs:
        ref.set_exception(error)
    source.request(source.plan(spec()), RANGES)
    assert asked(cluster) == [3, 2]


def view(cluster: Cluster, *indexes: int, near: int | None = None) -> PoolView:
    members = [cluster.actors[index] for index in indexes]
    chosen = frozenset() if near is None else frozenset([cluster.actors[near]._actor_id.hex()])
    return PoolView(life="1", members=members, near=chosen)


def test_one_that_is_near_is_preferred_among_equals_only(cluster: Cluster) -> None:
    for near in (0, 1):
        source = cluster.source()
        source.take_view(view(cluster, 0, 1, near=near))
        before = asked(cluster)
        for _ in range(5):
            source.request(source.plan(spec()), RANGES)
        assert [after - was for after, was in zip(asked(cluster), before, strict=True)] == [3 - near, 2 + near]


def test_one_that_does_not_answer_the_coordinator_is_asked_only_where_all_do_not(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())

    def silent(*actors: Actor) -> None:
        ids = frozenset(actor._actor_id.hex() for actor in actors)
        source.take_view(PoolView(life="1", members=list(cluster.actors), silent=ids))

    silent(cluster.actors[0])
    for _ in range(3):
        source.request(handle, RANGES)
    assert asked(cluster) == [0, 3]
    cluster.now += 1000
    assert overtake(cluster, source) == [0, 3]
    silent(*cluster.actors)
    source.request(handle, RANGES)
    assert asked(cluster) == [1, 3]
    silent(cluster.actors[1])
    source.request(handle, RANGES)
    assert asked(cluster) == [2, 3]


def test_one_that_comes_again_is_known_to_have_failed(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    for _ in range(2):
        source.request(handle, RANGES)
    cluster.actors[0].refs[0].set_exception(UNAVAILABLE)
    for members in (cluster.actors[1:], cluster.actors):
        source.take_view(PoolView(life="1", members=members))
    source.request(handle, RANGES)
    assert asked(cluster) == [1, 2]


def test_one_that_leaves_the_pool_is_not_asked_any_more_and_answers_what_it_was(cluster: Cluster) -> None:
    source = cluster.source()
    answers = [source.request(source.plan(spec()), RANGES) for _ in range(4)]
    assert asked(cluster) == [2, 2]
    source.take_view(view(cluster, 1))
    answers += [source.request(source.plan(spec()), RANGES) for _ in range(3)]
    assert asked(cluster) == [2, 5] and source.prefetchers == 1
    assert len(source.report("one", "n").may_ask) == 2
    for ref in cluster.actors[0].refs:
        ref.set_result("block")
    assert source.report("one", "n").may_ask == {cluster.actors[1]._actor_id.hex()}
    for ref in cluster.actors[1].refs:
        ref.set_result("block")
    assert [answer.result(5) for answer in answers] == ["block"] * 7
    source.take_view(PoolView(life="2", members=[]))  # of a coordinator that has just been restarted
    source.request(source.plan(spec()), RANGES)
    assert asked(cluster) == [2, 6]


def test_close_withdraws_what_one_that_left_has_not_begun(cluster: Cluster) -> None:
    source = cluster.source()
    for _ in range(4):
        source.request(source.plan(spec()), RANGES)
    source.take_view(view(cluster, 1))
    source.close()
    assert len(cluster.cancelled) == 4


def test_it_reports_open_requests_and_waits_since_the_last_report(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = cluster.source()
    answers = [source.request(source.plan(spec()), RANGES) for _ in range(2)]
    cluster.now += 6
    for actor in cluster.actors:
        for ref in actor.refs:
            ref.set_result("block")
    cluster.now += 2
    report = source.report("one", "n")
    assert (report.holder, report.node, report.incarnation, report.life) == ("one", "n", 1, "")
    assert (report.load.requests, report.load.waited) == (1.5, 0.0)
    waiting = source.request(source.plan(spec()), RANGES)
    ticks = iter([5.0, 5.5, 7.0, 8.5])
    monkeypatch.setattr(meter_module, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    for _ in range(2):
        with pytest.raises(FutureTimeoutError):
            waiting.exception(timeout=0.01)
    assert answers[0].exception() is None  # is here: no wait
    cluster.now += 4
    source.take_view(view(cluster, 0, 1))
    report = source.report("one", "n")
    assert (report.load.requests, report.load.waited, report.life) == (1.0, 0.5, "1")


def test_once_it_is_told_who_is_there_it_does_not_ask(cluster: Cluster) -> None:
    source = cluster.source()
    for told in (False, True):
        cluster.pool.calls.clear()
        if told:
            source.take_view(view(cluster, 0, 1))
        cluster.now += 10
        source.request(source.plan(spec()), RANGES)
        assert len(cluster.pool.calls) == (not told)


def test_it_reports_until_it_is_closed_or_dropped(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, no_threads_left: None
) -> None:
    del no_threads_left
    monkeypatch.setattr(reports_module, "REPORT_EVERY_S", 0.01)
    context = SimpleNamespace(get_node_id=lambda: "n")
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    closed, dropped = cluster.source(), [cluster.source()]
    closed.keep_reporting("closed")
    dropped[0].keep_reporting("dropped")
    until(lambda: {call[0].holder for call in cluster.report.calls} == {"closed", "dropped"})
    until(lambda: dropped[0].report("", "").life == "1")
    closed.close()
    dropped.clear()


def test_a_report_that_is_not_answered_is_not_followed_by_others(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports_module, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "n"))
    first = Ref()
    cluster.report.answer = lambda *_: first if len(cluster.report.calls) == 1 else PoolView(life="1", members=[])
    source = cluster.source()
    source.keep_reporting("one")
    time.sleep(0.3)
    assert len(cluster.report.calls) == 1
    first.set_exception(UNAVAILABLE)
    until(lambda: len(cluster.report.calls) > 1)
    source.close()


# --- what it asks again ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        (in_task(OSError("503")), True),
        (in_task(ConnectionResetError()), True),
        (ActorDiedError(), True),
        (lost(), True),
        (in_task(RuntimeError("panic")), False),
    ],
)
def test_what_time_may_heal_is_asked_for_again_within_the_window(
    cluster: Cluster, error: Exception, heals: bool
) -> None:
    source = cluster.source()
    delays = [source.retry_delay_s(error, attempt, 0.0) for attempt in (1, 2, 3)]
    assert delays == [0.1, 0.2, 0.4]
    for attempt in (4, 20, 5000):
        assert source.retry_delay_s(error, attempt, 59.0) == ((0.8 if attempt == 4 else 2.0) if heals else None)
        assert source.retry_delay_s(error, attempt, 61.0) is None
    assert source.retry_delay_s(error, 3, 61.0) == 0.4


def test_errors_of_the_users_are_final_and_withdrawn_requests_too(cluster: Cluster) -> None:
    source = cluster.source()
    for error in (in_task(TransformError("row 3")), TransformError("row 3"), TaskCancelledError()):
        assert source.retry_delay_s(error, 1, 0.0) is None


# --- lists of rows that were lost --------------------------------------------------------------------------


def fail(cluster: Cluster, source: RaySource, handle: PlanHandle, error: Exception) -> None:
    source.request(handle, RANGES)
    fail_one(cluster, source, error)


def fail_one(cluster: Cluster, source: RaySource, error: Exception, *, but: Ref | None = None) -> None:
    open_refs = [ref for actor in cluster.actors for ref in actor.refs if not ref.done() and ref is not but]
    open_refs[0].set_exception(error)
    assert source.retry_delay_s(error, 1, 0.0) is not None


def sent(cluster: Cluster, source: RaySource, handle: PlanHandle) -> Any:
    before = [len(actor.build.calls) for actor in cluster.actors]
    source.request(handle, RANGES)
    (call,) = [a.build.calls[-1] for a, n in zip(cluster.actors, before, strict=True) if len(a.build.calls) > n]
    return call[0].matching_rows


def test_only_a_lost_list_of_rows_is_built_again_and_only_once(cluster: Cluster) -> None:
    source = cluster.source()
    first, second = source.plan(spec(0, "id > 3")), source.plan(spec(1, "id > 3"))
    plain = source.plan(spec(2))
    cluster.ensure.calls.clear()
    fail(cluster, source, first, lost())  # a block
    fail(cluster, source, plain, in_task(lost()))  # there is no list
    fail(cluster, source, first, in_task(OSError("x")))
    assert cluster.ensure.calls == []
    source.request(first, RANGES)
    late = next(ref for actor in cluster.actors for ref in actor.refs if not ref.done())
    source.request(first, RANGES)
    fail_one(cluster, source, in_task(lost()), but=late)
    assert cluster.ensure.calls == [(first.spec, ["rows 1"])]
    for handle, rows in ((first, "rows 2"), (second, "rows 1"), (plain, None)):
        assert sent(cluster, source, handle) == rows
    late.set_exception(in_task(lost()))  # it was sent with the old list
    assert source.retry_delay_s(in_task(lost()), 1, 0.0) is not None
    assert len(cluster.ensure.calls) == 1


# --- late ones ---------------------------------------------------------------------------------------------


def overtake(cluster: Cluster, source: RaySource) -> list[int]:
    """Looks for late requests; returns how many each prefetcher is asked for then."""
    source._requests.overtake()
    return asked(cluster)


def test_a_late_request_is_sent_once_more_and_the_first_answer_counts(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    answers: list[Future[Any]] = [source.request(handle, RANGES) for _ in range(4)]  # two each
    slow, quick = cluster.actors
    for ref in quick.refs:
        ref.set_result("block")  # at once
    cluster.now += 0.9
    assert overtake(cluster, source) == [2, 2]
    cluster.now += 0.2
    assert overtake(cluster, source) == [2, 4]
    cluster.now += 1000
    assert overtake(cluster, source) == [2, 4]  # once for each request
    quick.refs[2].set_result("copy")
    first = next(answer for answer in answers if answer.done() and answer.result() == "copy")
    slow.refs[0].set_result("late")
    slow.refs[1].set_result("original")
    quick.refs[3].set_result("late copy")
    assert first.result() == "copy" and sorted(a.result() for a in answers) == ["block", "block", "copy", "original"]
    assert source.copies == 2


def test_what_is_late_is_told_by_what_is_usual(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    source.request(handle, RANGES)
    cluster.now += 29  # nothing is known yet
    assert sum(overtake(cluster, source)) == 1
    next(actor for actor in cluster.actors if actor.refs).refs[0].set_result("block")  # that is how this stream is
    source.request(handle, RANGES)
    cluster.now += 4 * 29 - 1
    assert sum(overtake(cluster, source)) == 2
    cluster.now += 2
    assert sum(overtake(cluster, source)) == 3


def test_copies_go_to_idle_prefetchers_only_and_requests_behind_late_ones_are_late(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    source.request(handle, RANGES)
    cluster.now += 0.1
    next(actor for actor in cluster.actors if actor.refs).refs[0].set_result("block")
    for actor in cluster.actors:
        actor.refs.clear()
    for _ in range(8):
        source.request(handle, RANGES)  # four each; two are begun, two stand behind them
    cluster.now += 0.5
    for ref in list(cluster.actors[1].refs):
        ref.set_result("block")
    assert overtake(cluster, source) == [4, 4]
    cluster.now += 1
    assert overtake(cluster, source) == [4, 6]  # as many as it builds at once
    for ref in cluster.actors[1].refs[4:]:
        ref.set_result("copy")
    assert overtake(cluster, source) == [4, 8]
    # The one that was overtaken is passed over for the time being.
    before = asked(cluster)
    for ref in cluster.actors[1].refs[6:]:
        ref.set_result("copy")
    source.request(handle, RANGES)
    assert asked(cluster) == [before[0], before[1] + 1]


def test_requests_at_the_front_of_one_that_died_are_not_late(cluster: Cluster) -> None:
    """They never began, and are lost in a moment as well."""
    del cluster.actors[1]
    source = cluster.source()
    for _ in range(6):
        source.request(source.plan(spec()), RANGES)
    (actor,) = cluster.actors
    for ref in actor.refs[:2]:
        ref.set_exception(ActorDiedError())
    cluster.now += 1000
    assert overtake(cluster, source) == [6]


def test_as_many_are_asked_as_hang_each_after_twice_the_time(cluster: Cluster) -> None:
    cluster.actors += [Actor("2"), Actor("3")]
    source = cluster.source()
    answer: Future[Any] = source.request(source.plan(spec()), RANGES)
    for passed_s, calls in ((29, 1), (2, 2), (28, 2), (31, 2), (2, 3), (118, 3), (3, 4), (1000, 4)):
        cluster.now += passed_s  # the usual is not known, so that 30 s are late
        assert sum(overtake(cluster, source)) == calls and max(asked(cluster)) == 1, passed_s
    cluster.actors[2].refs[0].set_result("block")
    assert answer.result() == "block" and source.copies == 3


def test_an_error_of_one_copy_waits_for_the_other_unless_it_is_final(cluster: Cluster) -> None:
    for error, final in (
        (ActorDiedError(), False),
        (in_task(OSError("x")), False),
        (in_task(TransformError("x")), True),
    ):
        for actor in cluster.actors:
            actor.refs.clear()
        source = cluster.source()
        answer: Future[Any] = source.request(source.plan(spec()), RANGES)
        cluster.now += 31
        assert overtake(cluster, source) == [1, 1]
        cluster.actors[0].refs[0].set_exception(error)
        assert answer.done() is final
        cluster.actors[1].refs[0].set_result("block")
        assert answer.exception() is error if final else answer.result() == "block"


def test_a_copy_that_fails_is_replaced_while_the_first_one_hangs(cluster: Cluster) -> None:
    source = cluster.source()
    answer: Future[Any] = source.request(source.plan(spec()), RANGES)
    cluster.now += 31
    assert overtake(cluster, source) == [1, 1]
    for number in range(3):  # the storage is in trouble, and the first prefetcher hangs
        cluster.actors[1].refs[number].set_exception(in_task(OSError("x")))
        cluster.now += 31
        assert overtake(cluster, source) == [1, number + 2] and not answer.done()
    cluster.actors[1].refs[3].set_result("block")
    assert answer.result() == "block"


# --- blocks that kill --------------------------------------------------------------------------------------


def die(cluster: Cluster, source: RaySource, handle: PlanHandle, *, other_process: bool = True) -> None:
    """Asks for the block and lets the process die that was asked."""
    answer = source.request(handle, RANGES)
    actor = next(actor for actor in cluster.actors if actor.refs and not actor.refs[-1].done())
    actor.refs[-1].set_exception(ActorDiedError())
    actor.process += other_process
    assert isinstance(answer.exception(), ActorDiedError)


def test_a_block_is_examined_after_three_processes_died_with_it(cluster: Cluster) -> None:
    del cluster.actors[1]
    source = cluster.source()
    handle = source.plan(spec())
    cluster.examine.answer = lambda *_: Findings([RANGES])
    for _ in range(20):  # one process that is not there: it is asked again and again while it is being restarted
        die(cluster, source, handle, other_process=False)
    assert not cluster.examine.calls
    source, deaths = cluster.source(), 0
    while not cluster.examine.calls:
        die(cluster, source, handle)
        deaths += 1
        if deaths >= 3:
            source.request(handle, RANGES)
    assert deaths == 3 and cluster.examine.calls == [(handle, RANGES)]


def test_where_processes_start_slowly_a_block_is_examined_before_its_window_is_over(cluster: Cluster) -> None:
    del cluster.actors[1]
    source = cluster.source()
    handle = source.plan(spec())
    cluster.examine.answer = lambda *_: Findings([RANGES])
    die(cluster, source, handle)
    cluster.now += 29
    die(cluster, source, handle, other_process=False)
    assert not cluster.examine.calls
    cluster.now += 2
    source.request(handle, RANGES)
    assert len(cluster.examine.calls) == 1


def test_the_row_that_kills_is_the_error_and_it_is_final(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    error = in_task(BlockError("row 7 kills"))
    cluster.examine.answer = raises(error)
    for _ in range(3):
        die(cluster, source, handle)
    assert source.request(handle, RANGES).exception(5) is error
    assert source.retry_delay_s(error, 4, 0.0) is None


def test_a_block_that_is_too_much_as_a_whole_is_put_together_from_its_parts(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec())
    first, second = halves(RANGES) or (RANGES, RANGES)
    cluster.examine.answer = lambda *_: Findings([first, second])
    for _ in range(3):
        die(cluster, source, handle)
    for attempt in range(2):  # the second time without another examination
        sent = sum(asked(cluster))
        answer = source.request(handle, RANGES)
        until(functools.partial(is_asked, cluster, sent + 2))
        for actor in cluster.actors:
            for call, ref in zip(actor.build.calls, actor.refs, strict=True):
                if not ref.done():
                    ref.set_result(Whole(pa.table({"split": call[1].places()[0]})))
        assert answer.result(5).rows["split"].to_pylist() == [0, 1, 2, 3], attempt
    assert len(cluster.examine.calls) == 1


def test_rows_that_kill_are_named_in_the_requests_of_their_plan(cluster: Cluster) -> None:
    source = cluster.source()
    handle, next_epoch = source.plan(spec()), source.plan(spec(1))
    row = SkippedRow(row_number=7, split=2, position=0, reason="kills")
    first, second = halves(RANGES) or (RANGES, RANGES)  # splits 0 and 1, 2 and 3
    cluster.examine.answer = lambda *_: Findings([first, second], [row])
    for _ in range(3):
        die(cluster, source, handle)
    sent = sum(asked(cluster))
    source.request(handle, RANGES)
    until(functools.partial(is_asked, cluster, sent + 2))
    found = {call[1]: call[3] for actor in cluster.actors for call in actor.build.calls[-2:] if call[1] != RANGES}
    assert found == {first: (), second: (row,)}
    later = Ranges(first_split=0, num_splits=4, start=1, stop=9)
    for plan, ranges, expected in ((handle, later, ()), (handle, second, (row,)), (next_epoch, second, ())):
        source.request(plan, ranges)
        calls = [actor.build.calls[-1] for actor in cluster.actors if actor.build.calls]
        assert (plan, ranges, 1, expected) in calls


def test_time_begins_anew_when_a_row_that_kills_was_found(cluster: Cluster) -> None:
    """The blocks that its process took along were lost for as long as it was looked for."""
    source = cluster.source()
    handle = source.plan(spec())
    assert source.retry_delay_s(UNAVAILABLE, 9, 70.0) is None
    row = SkippedRow(row_number=7, split=2, position=0, reason="kills")
    cluster.examine.answer = lambda *_: Findings([RANGES], [row])
    for _ in range(3):
        die(cluster, source, handle)
    sent = sum(asked(cluster))
    source.request(handle, RANGES)
    until(functools.partial(is_asked, cluster, sent + 1))
    cluster.now += 50
    assert source.retry_delay_s(UNAVAILABLE, 9, 70.0) is not None
    cluster.now += 20
    assert source.retry_delay_s(UNAVAILABLE, 9, 70.0) is None


def is_asked(cluster: Cluster, calls: int) -> bool:
    return sum(asked(cluster)) == calls


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def raises(error: Exception) -> Callable[..., Any]:
    def answer(*_: Any) -> Any:
        raise error

    return answer


# --- its end -----------------------------------------------------------------------------------------------


def test_close_withdraws_requests_and_never_starts_ray(cluster: Cluster) -> None:
    source = cluster.source()
    answer = source.request(source.plan(spec()), RANGES)
    source.close()
    assert len(cluster.cancelled) == 1
    cluster.initialized = False
    source.close()
    answer.cancel()
    assert len(cluster.cancelled) == 1


def test_close_ends_a_wait_for_the_coordinator(cluster: Cluster) -> None:
    source = cluster.source()
    cluster.ensure.answer = lambda *_: Ref()  # never answered
    out: list[BaseException] = []

    def use() -> None:
        try:
            source.plan(spec())
        except BaseException as error:
            out.append(error)

    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    source.close()
    thread.join(5)
    assert not thread.is_alive() and isinstance(out[0], StreamClosedError)


def test_a_request_that_is_lost_does_not_wait_for_the_coordinator(cluster: Cluster) -> None:
    """Whoever reads may have other blocks, and may want to end."""
    source = cluster.source()
    handle = source.plan(spec(0, "id > 3"))
    cluster.pool.calls.clear()
    cluster.ensure.calls.clear()
    answers = [Ref(), Ref()]
    cluster.pool.answer, cluster.ensure.answer = lambda: answers[0], lambda *_: answers[1]
    for _ in range(2):  # asked once until it has answered
        fail(cluster, source, handle, in_task(lost()))
        fail(cluster, source, handle, ActorDiedError())
    assert (len(cluster.pool.calls), len(cluster.ensure.calls)) == (1, 1)
    new = Actor("new")
    answers[0].set_result([new])
    answers[1].set_result(cluster.plan(spec(0, "id > 3"), ["rows 1"]))
    source.request(handle, RANGES)
    assert new.build.calls[0][0].matching_rows == "rows 2"
    answers[0] = Ref()
    new.refs[0].set_exception(ActorDiedError())
    assert source.retry_delay_s(ActorDiedError(), 1, 0.0) is not None
    assert len(cluster.pool.calls) == 2


def test_the_window_is_for_blocks_and_not_for_prefetchers_to_start(cluster: Cluster) -> None:
    """Nor for rows to be listed again: as long as the coordinator works on it."""
    source, answers = cluster.source(), [Ref(), Ref()]
    cluster.pool.answer = lambda: answers[0]
    for since_s in range(0, 900, 10):
        cluster.now = 100.0 + since_s
        assert source.retry_delay_s(ActorDiedError(), 5, since_s) is not None
        assert source.retry_delay_s(in_task(OSError()), 5, since_s) is not None  # the first after a long time, say
    answers.pop(0).set_result(list(cluster.actors))
    for since_s in range(890, 955, 10):  # from now on it counts: what comes next is answered at once
        cluster.now = 100.0 + since_s
        answers[0] = Ref()
        answers[0].set_result(list(cluster.actors))
        assert source.retry_delay_s(ActorDiedError(), 5, since_s) is not None
    cluster.now += 1
    assert source.retry_delay_s(ActorDiedError(), 5, 951) is None


def test_time_in_which_prefetchers_could_not_be_placed_counts(cluster: Cluster) -> None:
    """They had all the time they are given; the next question would take as long, and so on for ever."""
    source, answer = cluster.source(), Ref()
    cluster.pool.answer = lambda: answer
    assert source.retry_delay_s(ActorDiedError(), 5, 0.0) is not None
    cluster.now += 900
    assert source.retry_delay_s(ActorDiedError(), 6, 900.0) is not None
    answer.set_exception(in_task(PlacementError("no prefetcher could be placed within 900 s")))
    with pytest.raises(PlacementError, match="900 s"):
        source.retry_delay_s(ActorDiedError(), 7, 900.0)


def test_a_coordinator_that_never_answers_ends_the_waiting(cluster: Cluster) -> None:
    source, answer = cluster.source(), Ref()
    cluster.pool.answer = lambda: answer
    assert source.retry_delay_s(ActorDiedError(), 5, 0.0) is not None
    cluster.now += 3600 + 59
    assert source.retry_delay_s(ActorDiedError(), 5, 3659.0) is not None
    cluster.now += 2
    assert source.retry_delay_s(ActorDiedError(), 5, 3661.0) is None


def test_spans_of_questions_that_overlap_count_once(cluster: Cluster) -> None:
    coordination = Coordination(cluster, threading.Event())
    answers = {"a": Ref(), "b": Ref(), "c": Ref()}
    for at, what, done in ((0, "a", 0), (10, "b", 0), (20, "a", 1), (40, "b", 1), (50, "c", 0), (50.5, "c", 1)):
        cluster.now = 100.0 + at
        if done:
            answers[what].set_result(None)
        else:
            coordination.ask(what, functools.partial(answers.__getitem__, what), lambda _: None)
    cluster.now = 160.0
    assert [coordination.asked_s(within_s) for within_s in (15, 30, 50, 1000)] == [0, 10, 30, 40]
    answers["a"] = Ref()
    coordination.ask("a", lambda: answers["a"], lambda _: None)
    cluster.now = 170.0
    assert [coordination.asked_s(within_s) for within_s in (5, 15, 1000)] == [5, 10, 50]


def test_prefetchers_that_cannot_be_placed_are_waited_for_within_the_window(cluster: Cluster) -> None:
    source = cluster.source()
    unplaced = PlacementError("no prefetcher could be placed")

    def none() -> Any:
        raise in_task(unplaced)

    cluster.pool.answer = none
    for attempt in range(1, 9):
        assert source.retry_delay_s(ActorDiedError(), attempt, 59.0) is not None
    with pytest.raises(PlacementError, match="could be placed"):
        source.retry_delay_s(ActorDiedError(), 9, 61.0)
    source.take_view(PoolView(life="1", members=list(cluster.actors)))
    assert source.retry_delay_s(ActorDiedError(), 9, 61.0) is None  # they are there: it is not for want of them


def test_rows_that_cannot_be_listed_again_are_an_error(cluster: Cluster) -> None:
    source = cluster.source()
    handle = source.plan(spec(0, "id > 3"))

    def gone(*_: Any) -> Any:
        raise in_task(TableVersionError("the version is gone"))

    cluster.ensure.answer = gone
    source.request(handle, RANGES)
    next(ref for actor in cluster.actors for ref in actor.refs).set_exception(in_task(lost()))
    with pytest.raises(TableVersionError, match="version is gone"):
        source.retry_delay_s(in_task(lost()), 1, 0.0)
    assert source.retry_delay_s(ActorDiedError(), 1, 0.0) is not None  # raised once

    def outage(*_: Any) -> Any:
        raise in_task(OSError("503"))

    cluster.ensure.answer = outage
    source.request(handle, RANGES)
    open_refs = [ref for actor in cluster.actors for ref in actor.refs if not ref.done()]
    open_refs[0].set_exception(in_task(lost()))
    with pytest.raises(BlockError, match="503") as raised:
        source.retry_delay_s(in_task(lost()), 1, 0.0)
    assert isinstance(raised.value.__cause__, RayTaskError)


def test_a_long_wait_for_the_coordinator_is_told_of(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, answer, now = cluster.source(), Ref(), iter(range(0, 1000, 4))
    monkeypatch.setattr(coordination_module, "time", SimpleNamespace(monotonic=lambda: next(now)))
    cluster.ensure.answer = lambda *_: answer
    with ThreadPoolExecutor(1) as pool:
        planned = pool.submit(source.plan, spec(7))
        wait_until(lambda: bool(caplog.records) or planned.done(), 30, "it is told of")
        assert not planned.done()
        answer.set_result(cluster.plan(spec(7)))
        assert planned.result(5).spec == spec(7)
    assert "has not answered for 8 s: the plan of epoch 7" in caplog.text


def test_a_coordinator_that_has_ended_is_a_closed_stream(cluster: Cluster) -> None:
    source = cluster.source()

    def dead(*_: Any) -> Any:
        raise ActorDiedError()

    cluster.ensure.answer = cluster.pool.answer = dead
    with pytest.raises(StreamClosedError, match=r"actors have ended.*open the stream again"):
        source.plan(spec())
    with pytest.raises(StreamClosedError, match="actors have ended"):
        source.retry_delay_s(ActorDiedError(), 1, 0.0)
    with pytest.raises(StreamClosedError, match="actors have ended"):
        cluster.source()


# --- the prefetcher ----------------------------------------------------------------------------------------


def prefetcher(tables: Tables) -> tuple[Any, PlanSpec]:
    ref = TableRef(uri=tables.uri(50), name="t")
    recipe = BlockRecipe(table=ref)

    class Unpacked:
        def unpack(self) -> BlockRecipe:
            return recipe

    table = ref.open()
    parcel: Any = Unpacked()
    plan = PlanSpec(table=table.identity, order=OrderSpec(num_splits=4), epoch=0)
    return Prefetcher(parcel, None, "p"), plan


def test_a_request_of_a_newer_incarnation_raises_the_fence(tables: Tables) -> None:
    actor, plan = prefetcher(tables)  # as after a restart: nobody has told it of any incarnation
    handle, _ = actor.open_plan(plan)
    assert actor.build(handle, RANGES, 7).rows.num_rows == 4
    with pytest.raises(StaleIncarnationError):
        actor.build(handle, RANGES, 6)
    assert actor.build(handle, RANGES, 7).rows.num_rows == 4
    assert (actor.stats()["blocks"], actor.stats()["dropped"]) == (2, 1)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3)], ids=repr)
def test_a_transform_cannot_end_the_prefetcher(
    tables: Tables, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """An error that is final: whoever is asked again would fail as well."""

    def end(*_: Any) -> Any:
        raise error

    actor, plan = prefetcher(tables)
    monkeypatch.setattr(actor._builder, "open_plan", end)
    with pytest.raises(TransformError, match=rf"{type(error).__name__} was raised while opening a plan.*{error}"):
        actor.open_plan(plan)


def test_a_panic_of_native_code_does_not_end_the_prefetcher(tables: Tables, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        pass

    def panic(*_: Any) -> Any:
        raise PanicException("index out of bounds")

    actor, plan = prefetcher(tables)
    handle, _ = actor.open_plan(plan)
    monkeypatch.setattr(actor._builder, "build", panic)
    monkeypatch.setattr(actor._builder, "open_plan", panic)
    with pytest.raises(RuntimeError, match="PanicException while opening a plan: index out of bounds"):
        actor.open_plan(plan)
    with pytest.raises(RuntimeError, match="PanicException while building a block: index out of bounds"):
        actor.build(handle, RANGES, 0)
