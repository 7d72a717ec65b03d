"""``ray-lance-stream dashboard``: the Grafana dashboard of a stream's metrics."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

import click

from ray_lance_stream.cli import options


@click.command(short_help="Print a Grafana dashboard of the metrics.")
@click.option("--output", type=click.Path(dir_okay=False), metavar="FILE", help="Write it there instead.")
@options.debug
def dashboard(output: str | None) -> None:
    """Print a Grafana dashboard of the metrics that runs serve on Ray's Prometheus endpoints, as JSON to import.

    \b
    Example:
      ray-lance-stream dashboard --output lance_stream.json
    """
    if output is None:
        click.echo(dashboard_text(), nl=False)
    else:
        Path(output).write_text(dashboard_text(), encoding="utf-8")


def dashboard_text() -> str:
    """Returns the dashboard as JSON text."""
    return (resources.files("ray_lance_stream") / "dashboards" / "lance_stream.json").read_text(encoding="utf-8")
