"""``ray-lance-stream status``: what the runs on a cluster do now, and which block a trainer waits for."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import click

from ray_lance_stream.cli import options, text
from ray_lance_stream.errors import MissingStateError
from ray_lance_stream.errors import explain as explained
from ray_lance_stream.stats import SILENT_S

if TYPE_CHECKING:
    from ray_lance_stream.cluster.overview import Overview
    from ray_lance_stream.stats import PrefetcherStats, RankStats, StreamStats

_NODE_CHARACTERS: Final = 8  # of an id, as Ray's dashboard shows it


@click.command(short_help="Show what the runs on a cluster do now.")
@click.argument("run", metavar="[RUN]", required=False)
@click.option("--address", metavar="HOST:PORT", help="The cluster; by default RAY_ADDRESS, or the one on this machine.")
@click.option("--timeout", "timeout_s", default=10.0, show_default=True, help="Seconds to wait for the runs' answers.")
@options.json_output
@options.debug
def status(run: str | None, address: str | None, timeout_s: float, json_output: bool) -> None:
    """Show each stream of each run on a running cluster: where every rank stands, which one waits, for how long and
    for which block, what the prefetchers do, and what limits the run.

    RUN is the name of a Ray Train run, or the session that the actors' names begin with. Joins the cluster for the
    question, and starts none.

    \b
    Example:
      ray-lance-stream status digits
    """
    from ray_lance_stream.cluster.joining import cluster_address, joined
    from ray_lance_stream.cluster.overview import overview
    from ray_lance_stream.cluster.room import lacking

    with joined(address):
        found = overview("", timeout_s)
        chosen = [stats for stats in found.runs if run is None or run in (stats.run, stats.session)]
        if not chosen:
            raise _nothing(run, found, lacking(), cluster_address())
    if json_output:
        runs = [dataclasses.asdict(stats) | {"rows_per_s": stats.rows_per_s} for stats in chosen]
        click.echo(text.as_json({"runs": runs, "silent": found.silent}))
    else:
        click.echo("\n\n".join(_shown(stats) for stats in chosen))
        for session in found.silent:
            click.echo(f"\n{session}: its coordinator does not answer, or is just being started again")


def _nothing(run: str | None, found: Overview, lacking: str | None, cluster: str) -> MissingStateError:
    silent = f", and {', '.join(found.silent)}, which did not answer" if found.silent else ""
    names = sorted({stats.run or stats.session for stats in found.runs})
    return MissingStateError(
        explained(
            "no stream is running here" if run is None else f"no run {text.printable(run)!r} is here",
            found=(text.printable(", ".join(names)) or f"no run on {cluster}")
            + silent
            + (f"; {lacking}" if lacking else ""),
            expected="a run whose training workers have started"
            + ("" if run is None else ", which knows its name from then on"),
            remedy="wait for the run to start, or to start again after a failure; look at another cluster with "
            "--address; or, if it has ended, at where it stood: ray-lance-stream inspect RUN_DIRECTORY",
        )
    )


def _shown(stats: StreamStats) -> str:
    run = f"run {text.printable(stats.run)}" if stats.run else "outside Ray Train"
    title = f"{run}, stream {text.printable(stats.stream)} ({stats.session})"
    if not stats.stream:
        title = f"a stream that no worker has opened yet ({stats.session})"
    restarts = f", restarted {text.plural(stats.restarts, 'time')}" if stats.restarts else ""
    facts = [
        ("workers", f"{stats.world_size}{restarts}"),
        ("rows", f"{text.number(stats.rows_per_s)} a second"),
        ("buffers", f"{text.size(stats.buffered_bytes)}; {text.plural(stats.open_requests, 'block')} on the way"),
        ("prefetchers", f"{stats.working} of {stats.wanted} work"),
        (
            "losses",
            f"{text.plural(stats.retries, 'retry', 'retries')}, {text.plural(stats.rows_skipped, 'row')} skipped",
        ),
        ("verdict", stats.verdict),
    ]
    parts = [title, text.facts(facts)]
    if stats.ranks:
        parts.append(_ranks(stats.ranks))
    if stats.prefetchers:
        parts.append(_prefetchers(stats.prefetchers))
    return "\n\n".join(parts)


def _ranks(ranks: Sequence[RankStats]) -> str:
    rows = [
        (
            str(rank.rank),
            str(rank.epoch),
            f"{rank.step}/{rank.num_steps or '?'}",
            f"{rank.wait_share:.0%}",
            f"{rank.wait_p99_s:.3f} s",
            _now(rank),
            rank.node[:_NODE_CHARACTERS],
            _wait(rank),
        )
        for rank in ranks
    ]
    return text.table(("rank", "epoch", "step", "waits", "p99", "now", "node", "for"), rows, left=(6, 7))


def _now(rank: RankStats) -> str:
    if rank.silent_s > SILENT_S:
        return f"silent {rank.silent_s:.0f} s" if math.isfinite(rank.silent_s) else "silent"
    return f"{rank.waiting_s:.1f} s" if rank.waiting_s else "-"


def _wait(rank: RankStats) -> str:
    if not rank.waiting_for:
        return "its batch being made, or other ranks" if rank.waiting_s else "-"
    of = f", asked of {', '.join(map(str, rank.asked_of))}" if rank.asked_of else ""
    return rank.waiting_for + of


def _prefetchers(prefetchers: Sequence[PrefetcherStats]) -> str:
    rows = [
        (
            str(p.index),
            p.state,
            f"{p.busy_share:.0%}",
            text.number(p.rows),
            *_times(p),
            p.node[:_NODE_CHARACTERS] or "-",
        )
        for p in prefetchers
    ]
    return text.table(("prefetcher", "state", "busy", "rows", "reading", "transform", "node"), rows, left=(1, 6))


def _times(prefetcher: PrefetcherStats) -> tuple[str, str]:
    return f"{prefetcher.take_s:.1f} s", f"{prefetcher.transform_s:.1f} s"
