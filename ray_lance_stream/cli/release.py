"""``ray-lance-stream release``: removes the tags with which runs keep table versions alive."""

from __future__ import annotations

from collections.abc import Mapping

import click

from ray_lance_stream.cli import options, text


@click.command(short_help="Remove the tags that protect a run's table versions.")
@options.uri
@options.table
@click.option(
    "--run", metavar="RUN", help="Whose tags to remove: what protect_version was. Without it, they are listed."
)
@click.option(
    "--keep",
    "kept",
    metavar="PATH",
    multiple=True,
    callback=lambda context, parameter, values: tuple(options.uri_given(context, parameter, v) for v in values),
    help="A checkpoint, or a run's directory of them: versions that they refer to stay protected; repeatable.",
)
@options.storage_option
@options.json_output
@options.debug
def release(
    uri: str, table: str, run: str | None, kept: tuple[str, ...], storage_options: Mapping[str, str], json_output: bool
) -> None:
    """Remove the tags by which LanceStream(protect_version=RUN) keeps versions of TABLE in the database URI.

    Do so when the checkpoints of the run are no longer needed: what Lance then cleans up cannot be resumed from. With
    --keep, only versions are released that no checkpoint left in PATH refers to.

    \b
    Examples:
      ray-lance-stream release /data/db digits
      ray-lance-stream release /data/db digits --run digits-1 --keep /runs/1
    """
    if kept and run is None:
        raise click.UsageError("--keep needs --run")
    from ray_lance_stream import tags
    from ray_lance_stream.cli.loading import versions_in

    ref = options.table_ref(uri, table, storage_options)
    if run is None:
        found, verb = tags.protections(ref), "protected by"
    else:
        versions = {version for path in kept for version in versions_in(path)}
        found, verb = tags.release(ref, run, versions), "released: removed"
    if json_output:
        click.echo(text.as_json([{"version": f.version, "run": f.run, "tag": f.tag} for f in found]))
        return
    for protection in found:
        click.echo(f"version {protection.version} {verb} {text.printable(protection.tag)}")
    if not found:
        click.echo(f"no version of {text.printable(table)} is protected" if run is None else "nothing to release")
