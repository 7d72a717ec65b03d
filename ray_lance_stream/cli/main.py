"""The command group: what every command does with errors, and the entry point."""

from __future__ import annotations

import errno
import traceback
from typing import Any, Final

import click

from ray_lance_stream.cli import options
from ray_lance_stream.cli.bench import bench
from ray_lance_stream.cli.convert import convert
from ray_lance_stream.cli.dashboard import dashboard
from ray_lance_stream.cli.diff import diff
from ray_lance_stream.cli.explain import explain
from ray_lance_stream.cli.inspect import inspect
from ray_lance_stream.cli.masking import masked
from ray_lance_stream.cli.plan import plan
from ray_lance_stream.cli.release import release
from ray_lance_stream.cli.status import status
from ray_lance_stream.errors import LanceStreamError

ERROR: Final = 2  # as click has it for wrong usage; 1 is an answer of `diff`
_INTERRUPTED: Final = 130


class Commands(click.Group):
    """Says in one line what went wrong, without credentials; the traceback only if asked for."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.EPIPE:
                raise  # whoever read our output has seen enough; click ends quietly
            if ctx.meta.get(options.DEBUG):
                click.echo(masked(ctx, traceback.format_exc()), err=True, nl=False)
            click.echo(f"ray-lance-stream: {' '.join(masked(ctx, _what(error)).split())}", err=True)
            ctx.exit(ERROR)


def _what(error: Exception) -> str:
    if isinstance(error, LanceStreamError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    del parameter
    if not value:
        return
    from importlib import metadata

    try:
        click.echo(f"ray-lance-stream {metadata.version('ray-lance-stream')}")
    except metadata.PackageNotFoundError:  # run from a directory of sources
        click.echo("ray-lance-stream, not installed as a package")
    context.exit()


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@options.debug
@click.option("--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version.")
def cli() -> None:
    """Look at the streams of ray_lance_stream: checkpoints, setups, steps, runs.

    Nothing is started and no code from a file is run, except the transform that is given to `bench`; `status` alone
    needs a running Ray. Checkpoints are given as a path or a URI (s3://bucket/run/checkpoint_000012), databases as for
    lancedb.connect. Exit codes: 0, or 2 on an error; `diff` ends with 1 if the checkpoints differ.

    \b
    Example:
      ray-lance-stream inspect /runs/digits/checkpoint_000012
    """


for command in (inspect, diff, plan, explain, convert, release, status, dashboard, bench):
    cli.add_command(command)


def main() -> None:
    """Entry point of the script."""
    cli(prog_name="ray-lance-stream")
