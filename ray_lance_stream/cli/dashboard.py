"""``ray-lance-stream dashboard``: the Grafana dashboard of a stream's metrics."""

from __future__ import annotations

from importlib import resources

import click

from ray_lance_stream.cli import options


@click.command(short_help="Print a Grafana dashboard of the metrics.")
@options.debug
def dashboard() -> None:
    """Print a Grafana dashboard of the metrics that runs serve on Ray's Prometheus endpoints, as JSON to import.

    \b
    Example:
      ray-lance-stream dashboard > lance_stream.json
    """
    click.echo(dashboard_text(), nl=False)


def dashboard_text() -> str:
    """Returns the dashboard as JSON text."""
    return (resources.files("ray_lance_stream") / "dashboards" / "lance_stream.json").read_text(encoding="utf-8")
