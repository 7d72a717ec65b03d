"""The layers: who may import whom, and that the pure ones need nothing but numpy."""

from __future__ import annotations

import ast
import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ray_lance_stream import errors

PACKAGE = "ray_lance_stream"
ROOT = Path(errors.__file__).parent

# A module imports only modules that stand before it. A new module takes its place here.
ORDER = (
    # Numbers in, numbers out.
    "errors",
    "gone",
    "redacting",
    "storage",
    "permutation",
    "plan",
    "topology",
    "counts",
    "packspec",
    "packstate",
    "packing",
    "stepskips",
    "provenance",
    "state",
    "rowcursor",
    "packedcursor",
    "waits",
    # Lance rows to Arrow blocks.
    "request",
    "origins",
    "sifting",
    "rownumbers",
    "sqltext",
    "readable",
    "unreadable",
    "diskcache",
    "table",
    "cachedtable",
    "apitable",
    "memorysource",
    "remotesource",
    "apisource",
    "location",
    "tags",
    "columns",
    "rowcontext",
    "transform",
    "userplan",
    "rowlists",
    "trial",
    "recent",
    "opentables",
    "block",
    "tokens",
    # Blocks to batches.
    "stats",
    "verdict",
    "progress",
    "config",
    "layout",
    "collate",
    "delivery",
    "source",
    "flight",
    "reader",
    "survivors",
    "packedreader",
    "checkpoint",
    "resuming",
    "gathering",
    "opening",
    "position",
    "groupagreement",
    "readers",
    "handedout",
    "demand",
    "simulatedpool",
    "simulation",
    "agreement",
    "link",
    "observing",
    "core",
    "local",
    "batches",
    "shard",
    "streambase",
    "rowstream",
    "packedstream",
    # Ray.
    "cluster.__init__",
    "cluster.parcel",
    "cluster.leases",
    "cluster.placement",
    "cluster.sizing",
    "cluster.meter",
    "cluster.sightings",
    "cluster.metrics",
    "cluster.prefetcher",
    "cluster.answers",
    "cluster.cuts",
    "cluster.examiner",
    "cluster.reports",
    "cluster.hand",
    "cluster.roster",
    "cluster.coordinator",
    "cluster.told",
    "cluster.announcing",
    "cluster.notes",
    "cluster.manager",
    "cluster.pool",
    "cluster.requests",
    "cluster.coordination",
    "cluster.source",
    "cluster.session",
    "cluster.overview",
    "cluster.room",
    "cluster.joining",
    "rowsource",
    "dataset",
    "loader",
    "trainlink",
    "saving",
    "train",
    "mapbatches",
    "datasource",
    "outside",
    "stream",
    "testing",
    # Trainers that run the loop themselves.
    "integrations.__init__",
    "integrations.trained",
    "integrations.lightning",
    "integrations.transformers",
    # The command line.
    "explaining",
    "cli.__init__",
    "cli.masking",
    "cli.text",
    "cli.options",
    "cli.loading",
    "cli.describe",
    "cli.flight",
    "cli.demand",
    "cli.planning",
    "cli.inspect",
    "cli.diff",
    "cli.plan",
    "cli.explain",
    "cli.convert",
    "cli.release",
    "cli.bench",
    "cli.dashboard",
    "cli.status",
    "cli.main",
    "cli.__main__",
    # Pages to read.
    "howto.__init__",
    "howto.splits",
    "howto.pool",
    "howto.shrinking",
    "howto.model_parallel",
    "howto.moving",
    "howto.restoring",
    "howto.guarantees",
    "__init__",
)
PURE = (
    "errors",
    "gone",
    "permutation",
    "plan",
    "topology",
    "counts",
    "packspec",
    "packstate",
    "packing",
    "stepskips",
    "provenance",
    "state",
    "rowcursor",
    "packedcursor",
    "demand",
    "waits",
    "stats",
    "verdict",
    "cluster.sizing",
)
ROWS_TO_BLOCKS = (
    "request",
    "origins",
    "sifting",
    "rownumbers",
    "sqltext",
    "readable",
    "unreadable",
    "diskcache",
    "table",
    "cachedtable",
    "apitable",
    "memorysource",
    "remotesource",
    "apisource",
    "location",
    "tags",
    "columns",
    "rowcontext",
    "transform",
    "userplan",
    "rowlists",
    "trial",
    "recent",
    "opentables",
    "block",
    "tokens",
)
RAY_MODULES = (
    "trainlink",
    "saving",
    "train",
    "outside",
    "stream",
    "rowsource",
    "datasource",
    "mapbatches",
    "integrations.lightning",
    "integrations.transformers",
)  # and cluster/
TORCH_MODULES = (  # their classes are torch's
    "packedstream",
    "dataset",
    "loader",
    "integrations.lightning",
    "integrations.transformers",
)
# Where Lance is opened, and who brings it along. A trainer, a controller or a state manager that needed it
# would start seconds later and hold its threads.
LANCE_MODULES = {
    "rownumbers",
    "table",
    "cachedtable",
    "memorysource",
    "apisource",
    "location",
    "tags",
    "rowlists",
    "opentables",
    "block",
    "tokens",
    "opening",
    "local",
    "rowsource",
    "datasource",
    "dataset",
    "loader",
}
HEAVY = {"ray", "torch", "lancedb", "lance", "pyarrow", "pandas"}

# Imports against the order, with the reason. Each must still exist, and must not be at module level.
AGAINST_THE_ORDER = {
    ("link", "core", "typing"): "names a type only",
    ("observing", "core", "typing"): "names a type only",
    ("core", "batches", "typing"): "names a type only",
    ("batches", "shard", "typing"): "names a type only",
}


@dataclass(frozen=True)
class Import:
    """One import statement's target, and where it stands: "module", "function" or "typing"."""

    importer: str
    target: str
    where: str
    line: int


def module_files() -> dict[str, Path]:
    """Returns {name below the package: file}."""
    files = sorted(ROOT.rglob("*.py"))
    return {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}


FILES = module_files()


def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yields full module names; ``from package import name`` names the module if there is one."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    assert node.level == 0, "imports are absolute in this package"
    base = node.module or ""
    for alias in node.names:
        inner = f"{base}.{alias.name}".removeprefix(f"{PACKAGE}.")
        is_module = inner in FILES or f"{inner}.__init__" in FILES
        yield f"{base}.{alias.name}" if base.split(".")[0] == PACKAGE and is_module else base


def imports_in(name: str, tree: ast.AST, where: str = "module") -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from (Import(name, target, where, node.lineno) for target in targets(node))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                yield from imports_in(name, ast.Module([child], []), "typing")
            for child in node.orelse:
                yield from imports_in(name, ast.Module([child], []), where)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from imports_in(name, node, "typing" if where == "typing" else "function")
        else:
            yield from imports_in(name, node, where)


IMPORTS = [item for name, file in FILES.items() for item in imports_in(name, ast.parse(file.read_text()))]


def third_party(name: str, *where: str) -> set[str]:
    """Returns the top-level packages that a module imports at the given kinds of places (default: all)."""
    chosen = [item for item in IMPORTS if item.importer == name and (not where or item.where in where)]
    return {item.target.split(".")[0] for item in chosen} - {PACKAGE}


def internal(item: Import) -> str | None:
    """Returns the imported module's name below the package, or None if it is another package's."""
    if item.target == PACKAGE:
        return "__init__"
    if not item.target.startswith(f"{PACKAGE}."):
        return None
    inner = item.target.removeprefix(f"{PACKAGE}.")
    return f"{inner}.__init__" if f"{inner}.__init__" in FILES else inner


# --- the graph ---------------------------------------------------------------------------------------


def test_every_module_has_its_place() -> None:
    assert len(set(ORDER)) == len(ORDER)
    assert set(FILES) - set(ORDER) == set(), "new modules: give them their place in ORDER"
    assert set(ORDER) - set(FILES) == set(), "modules that are gone: take them out of ORDER"


def test_imports_follow_the_order() -> None:
    against = {}
    for item in IMPORTS:
        target = internal(item)
        if target is None:
            continue
        assert target in FILES, f"{item} imports a module that does not exist"
        if ORDER.index(target) >= ORDER.index(item.importer):
            against[item.importer, target, item.where] = item
    unexpected = [item for key, item in against.items() if key not in AGAINST_THE_ORDER]
    assert not unexpected, "imports of a module that stands later"
    needless = set(AGAINST_THE_ORDER) - set(against)
    assert not needless, "exceptions that are not needed any more"
    assert all(where != "module" for _, _, where in AGAINST_THE_ORDER)


def test_no_cycle_at_module_level() -> None:
    edges: dict[str, set[str]] = {name: set() for name in FILES}
    for item in IMPORTS:
        target = internal(item)
        if target is not None and item.where == "module":
            edges[item.importer].add(target)
    done: set[str] = set()
    while len(done) < len(edges):
        ready = {name for name in edges if name not in done and edges[name] <= done}
        assert ready, f"a cycle among {sorted(set(edges) - done)}"
        done |= ready


# --- what each layer may need ------------------------------------------------------------------------


@pytest.mark.parametrize("name", PURE)
def test_the_pure_layer_needs_numpy_only(name: str) -> None:
    """At module level, in functions and for types: numbers in, numbers out."""
    assert third_party(name) <= {"numpy", *sys.stdlib_module_names}


@pytest.mark.parametrize("name", ROWS_TO_BLOCKS)
def test_rows_to_blocks_needs_neither_torch_nor_ray(name: str) -> None:
    assert not third_party(name) & {"ray", "torch", "pandas"}


@pytest.mark.parametrize(
    "name", [name for name in FILES if not name.startswith("cluster.") and name not in RAY_MODULES]
)
def test_ray_stays_on_its_side(name: str) -> None:
    assert "ray" not in third_party(name), "only cluster/ and the modules named above know Ray"
    torch_at_once = "torch" in third_party(name, "module")
    assert not torch_at_once or name in TORCH_MODULES, "torch is imported where a tensor is made"


@pytest.mark.parametrize("name", [name for name in FILES if name.startswith("cluster.")])
def test_actors_need_no_torch(name: str) -> None:
    assert "torch" not in third_party(name)


def loaded_with(name: str) -> set[str]:
    """Returns the modules of this package that importing one loads at once, itself included."""
    found: set[str] = set()
    waiting = [name]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            needs = (internal(item) for item in IMPORTS if item.importer == module and item.where == "module")
            waiting += [target for target in needs if target is not None]
    return found


@pytest.mark.parametrize("name", [name for name in FILES if name not in LANCE_MODULES])
def test_lance_stays_out_of_trainers_and_controllers(name: str) -> None:
    assert not third_party(name) & {"lance", "lancedb"}
    assert not loaded_with(name) & LANCE_MODULES


def test_the_package_itself_loads_nothing() -> None:
    assert loaded_with("__init__") == {"__init__"}


def test_the_package_says_the_same_to_python_and_to_type_checkers() -> None:
    tree = ast.parse(FILES["__init__"].read_text())
    typed = {
        alias.name: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}.")
        for alias in node.names
    }
    homes = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOME"
    )
    assert typed == {name: f"{PACKAGE}.{module}" for name, module in homes.items()}
    for name, module in homes.items():
        assert f" {name}" in FILES[module].read_text()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("names", "forbidden"), [(PURE, HEAVY), (ROWS_TO_BLOCKS, {"ray", "torch"})], ids=["pure", "rows to blocks"]
)
def test_loading_a_layer_loads_nothing_heavier(names: tuple[str, ...], forbidden: set[str]) -> None:
    """What the ast cannot see: an import through another package, or through the package itself."""
    modules = ", ".join(f"{PACKAGE}.{name}" for name in names)
    script = f"import sys, {modules}; print(sorted({forbidden!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


# --- exceptions cross process borders ----------------------------------------------------------------

EXCEPTIONS = [
    value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, errors.LanceStreamError)
]


def test_every_exception_has_the_common_base() -> None:
    raised = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, BaseException)]
    assert set(raised) == set(EXCEPTIONS)
    assert len(EXCEPTIONS) >= 11
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.StateError, ValueError)


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_exceptions_survive_pickle(kind: type[errors.LanceStreamError]) -> None:
    arguments: tuple[Any, ...] = ("what. Found: 1. Remedy: é 'x'.",)
    if kind is errors.StateMismatchError:
        arguments += ("filter", "x > 1", None)
    error = kind(*arguments)
    error.add_note("seen on rank 3") if hasattr(error, "add_note") else None
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        loaded = pickle.loads(pickle.dumps(error, protocol))
        assert type(loaded) is kind
        assert str(loaded) == str(error) == arguments[0]
        assert loaded.args == error.args
        assert vars(loaded) == vars(error)


def test_a_mismatch_keeps_its_field_and_values() -> None:
    error = errors.StateMismatchError("text", "table", {"version": 1}, [2])
    loaded = pickle.loads(pickle.dumps(error))
    assert (loaded.field, loaded.saved, loaded.current) == ("table", {"version": 1}, [2])
    assert str(errors.StateMismatchError("text")) == "text"


def test_explain_and_shown() -> None:
    text = errors.explain("n is too small", found=0, expected="an integer >= 1", remedy="pass 48")
    assert text == "n is too small. Found: 0. Expected: an integer >= 1. Remedy: pass 48."
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert errors.shown("x") == "'x'"
    assert len(errors.shown("x" * 1000)) == 80
    assert errors.shown(10**5000) == "<int that cannot be shown>"
    assert errors.shown(deep) == "<list that cannot be shown>"


@pytest.mark.parametrize("name", [name for name in FILES if name != "gone"])
def test_what_python_does_with_garbage_is_done_in_one_place(name: str) -> None:
    """It does it on any thread, inside anything; ``gone`` says what that may break."""
    for node in ast.walk(ast.parse(FILES[name].read_text())):
        called = ast.unparse(node.func).rsplit(".")[-1] if isinstance(node, ast.Call) else ""
        assert called != "finalize", "use gone.when_gone"
        assert called not in {"ref", "proxy"} or len(node.args) == 1, "use gone.when_gone"  # type: ignore[attr-defined]
        assert not isinstance(node, ast.FunctionDef) or node.name != "__del__", "use gone.when_gone"
