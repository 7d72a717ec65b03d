"""The command line as a whole: help, speed of loading, exit codes, and credentials that stay out of it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import traceback
import urllib.request
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import lancedb
import pytest
from checkpoints import run, saved, state_at
from conftest import Tables, rows_from
from moto.server import ThreadedMotoServer

from ray_lance_stream import LanceStream
from ray_lance_stream.checkpoint import locate, write_streams
from ray_lance_stream.cli import inspect as inspect_module
from ray_lance_stream.cli.main import cli, main
from ray_lance_stream.state import StreamState
from ray_lance_stream.testing import global_batches

pytestmark = pytest.mark.thorough

COMMANDS = ("bench", "convert", "dashboard", "diff", "explain", "inspect", "plan", "release", "status")
SECRET = "hush-hush-secret"


def script(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


# --- help --------------------------------------------------------------------------------------------


def test_help_names_every_command_in_whole() -> None:
    done = run("--help")
    assert done.exit_code == 0
    assert set(COMMANDS) == set(cli.commands)
    for name in COMMANDS:
        help_text = cli.commands[name].short_help
        assert help_text and f"  {name.ljust(9)}  {help_text}\n" in done.stdout, "not cut"


def test_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    for found, shown in (("1.2.3", "1.2.3"), (None, "not installed")):

        def version(name: str, found: str | None = found) -> str:
            if found is None:
                raise metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(metadata, "version", version)
        done = run("--version")
        assert done.exit_code == 0 and done.stdout.startswith("ray-lance-stream") and shown in done.stdout


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_parses(name: str, columns: int) -> None:
    done = run(name, "--help", columns=columns)
    assert done.exit_code == 0 and all(len(line) <= columns for line in done.stdout.splitlines())
    text = done.stdout.split("Example", 1)[1].split("Options:")[0].replace("\\\n", " ")
    examples = [line.split() for line in text.splitlines() if line.split()[:1] == ["ray-lance-stream"]]
    assert examples
    for words in examples:
        assert words[:2] == ["ray-lance-stream", name]
        context = cli.commands[name].make_context(name, words[2:])
        assert context.params


def test_every_option_is_explained() -> None:
    for name, command in cli.commands.items():
        for parameter in command.params:
            assert isinstance(parameter, click.Argument) or (isinstance(parameter, click.Option) and parameter.help), (
                f"{name} {parameter.name}"
            )


def test_help_loads_nothing_heavy() -> None:
    """What makes a newcomer wait: numpy, Arrow, Lance, torch, Ray."""
    code = (
        "import sys\n"
        "from ray_lance_stream.cli.main import cli\n"
        "for arguments in (['--help'], ['plan', '--help'], ['explain', '-h']):\n"
        "    cli.main(arguments, standalone_mode=False)\n"
        "print(sorted({'numpy', 'pyarrow', 'lance', 'lancedb', 'torch', 'ray'} & set(sys.modules)))\n"
    )
    done = script(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", ["inspect", "explain", "plan"])
def test_commands_need_neither_ray_nor_torch(tables: Tables, tmp_path: Path, name: str) -> None:
    arguments = {
        "inspect": [str(saved(tmp_path, state_at()))],
        "explain": [tables.uri(50), "t", "--step", "1", "--num-splits", "4", "--global-batch-size", "8"],
        "plan": [tables.uri(50), "t", "--num-splits", "4", "--global-batch-size", "8"],
    }[name]
    code = (
        "import sys\n"
        "from ray_lance_stream.cli.main import cli\n"
        "cli.main(sys.argv[1:], standalone_mode=False)\n"
        "print(sorted({'torch', 'ray'} & set(sys.modules)))\n"
    )
    done = script(code, name, *arguments)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ray_lance_stream.cli", "inspect", "no/such/place"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ray-lance-stream: ") and "no/such/place does not exist" in done.stderr


# --- errors ------------------------------------------------------------------------------------------


def test_debug_shows_where() -> None:
    for arguments in (["inspect", "nowhere", "--debug"], ["--debug", "inspect", "nowhere"]):
        done = run(*arguments)
        assert done.exit_code == 2
        assert done.stderr.startswith("Traceback (most recent call last):")
        assert "MissingStateError" in done.stderr and "nowhere does not exist" in done.stderr.splitlines()[-1]
    assert "Traceback" not in run("inspect", "nowhere").stderr


def test_an_error_nobody_expected_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exit code 1 is an answer of diff, so that nothing else may end with it."""

    def broken(*_: object) -> str:
        raise KeyError("some\nthing")

    monkeypatch.setattr(inspect_module, "_facts", broken)
    done = run("inspect", saved(tmp_path, state_at()))
    assert (done.exit_code, done.stderr) == (2, "ray-lance-stream: KeyError: 'some\\nthing'\n")


def test_an_interrupt_is_no_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def interrupted(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect_module, "_facts", interrupted)
    assert run("inspect", saved(tmp_path, state_at())).exit_code == 130


def test_a_reader_that_leaves_is_no_error(tables: Tables) -> None:
    arguments = f"explain {tables.uri(5000)} t --step 1 --num-splits 1 --global-batch-size 5000 --limit 5000"
    command = f"{sys.executable} -m ray_lance_stream.cli {arguments} | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.startswith("t, version 2") and done.stderr == ""


def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "lance_stream.json").symlink_to(tmp_path / "lance_stream.json")
    done = run("inspect", tmp_path / "checkpoint")  # the link leads nowhere
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1


# --- credentials -------------------------------------------------------------------------------------


def options_of(secret: str) -> list[str]:
    return [
        f"--storage-option=aws_secret_access_key={secret}",
        "--storage-option=aws_access_key_id=some-access-key",
        f"--storage-option=aws_endpoint=http://127.0.0.1:9/{secret}",
        "--storage-option=allow_http=true",
        "--storage-option=aws_region=us-east-1",
        "--storage-option=client_max_retries=0",
        "--storage-option=connect_timeout=1s",
    ]


@pytest.mark.parametrize("debug", [[], ["--debug"]], ids=["one line", "traceback"])
def test_a_store_that_cannot_be_reached_shows_no_secret(debug: list[str]) -> None:
    arguments = ["s3://bucket/db", "t", "--num-splits", "4", "--global-batch-size", "8"]
    done = run("plan", *arguments, *options_of(SECRET), *debug)
    assert (done.exit_code, done.stdout) == (2, "")
    assert "table 't' cannot be opened" in done.stderr
    assert SECRET not in done.stderr and "some-access-key" not in done.stderr
    assert ("Traceback" in done.stderr) == bool(debug)


@pytest.fixture
def store() -> Iterator[str]:
    """Host and port of an object store with an empty bucket."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        urllib.request.urlopen(urllib.request.Request(f"http://{host}:{port}/bucket", method="PUT"))
        yield f"{host}:{port}"
    finally:
        server.stop()


def test_an_object_store(store: str) -> None:
    """Tables with storage options, checkpoints by URI; no credentials in what is printed."""
    options = {"aws_endpoint": f"http://{store}", "allow_http": "true", "aws_region": "us-east-1"}
    options |= {"aws_access_key_id": "some-access-key", "aws_secret_access_key": SECRET}
    lancedb.connect("s3://bucket/db", storage_options=options).create_table("t", rows_from(0, 50))
    flags = [part for key, value in options.items() for part in ("--storage-option", f"{key}={value}")]
    stream = LanceStream(
        "s3://bucket/db", "t", num_splits=4, global_batch_size=8, shuffle_seed=7, storage_options=options
    )
    batches = global_batches(stream)
    query = f"?endpoint_override={store}&scheme=http&region=us-east-1"
    place = f"s3://some-access-key:{SECRET}@bucket/run/checkpoint{query}"
    write_streams(*locate(place), {"train": StreamState.from_dict(batches[1].state)})

    steps = ("--global-batch-size", 8)
    planned = run("plan", "s3://bucket/db", "t", "--num-splits", 4, *steps, *flags)
    told = run("inspect", place, "--uri", "s3://bucket/db", "--table", "t", *steps, *flags)
    said = run("explain", "s3://bucket/db", "t", "--step", 3, "--checkpoint", place, *steps, *flags, "--json")
    copied = run("convert", place, place.replace("checkpoint?", "copy?"), "--to", "checkpoint")
    same = run("diff", place, place.replace("checkpoint?", "copy?"))
    for done in (planned, told, said, copied, same):
        assert (done.exit_code, done.stderr) == (0, "")
        assert SECRET not in done.stdout and "some-access-key" not in done.stdout
    assert "12 in each of 4 splits" in planned.stdout
    assert told.stdout.startswith("bucket/run/checkpoint (lance_stream.json)") and "2 of 6 finished" in told.stdout
    assert [row["row"] for row in json.loads(said.stdout)["rows"]] == batches[2].columns["id"].tolist()
    assert copied.stdout.startswith("wrote bucket/run/copy/lance_stream.json")
    assert same.stdout == "train: no difference\n"


def test_a_malformed_option_is_not_repeated(tables: Tables) -> None:
    arguments = ["plan", tables.uri(50), "t", "--num-splits", "4", "--global-batch-size", "8"]
    for given in (SECRET, f"={SECRET}"):
        done = run(*arguments, "--storage-option", given)
        assert done.exit_code == 2 and "KEY=VALUE" in done.stderr and SECRET not in done.output


@pytest.mark.parametrize("password", [SECRET, "hush%2Fhush%2Fsecret"])
def test_the_password_of_a_uri_is_not_shown(monkeypatch: pytest.MonkeyPatch, password: str) -> None:
    from ray_lance_stream.cli import loading

    def failing(text: str, of: object) -> None:
        del of
        raise OSError(f"cannot read {text} or {text.replace('%2F', '/')}")

    monkeypatch.setattr(loading, "load", failing)
    done = run("inspect", f"s3://the-user:{password}@bucket/run", "--debug")
    assert done.exit_code == 2
    for text in ("the-user", password, password.replace("%2F", "/")):
        assert text not in done.stderr
    assert "s3://***:***@bucket/run" in done.stderr


def test_the_traceback_of_this_test_would_show_it() -> None:
    """That the check above can fail: Python's own traceback does show what the error says."""
    try:
        raise OSError(SECRET)
    except OSError:
        assert SECRET in traceback.format_exc()


def test_the_script_is_the_command_line() -> None:
    project = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    name, value = re.findall(r'\[project\.scripts\]\n(\S+) = "(\S+)"', project)[0]
    assert name == "ray-lance-stream"
    assert metadata.EntryPoint(name=name, value=value, group="console_scripts").load() is main
