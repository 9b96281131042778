"""Arrows point down: which room (folder) of aiops may import from which.

::

    shells   serving  net  sim        client/{asyncio,sync}     await, sockets, threads, clocks
    decide   engine  shards           client (the rest)  averaging
    know     algorithms  store  kernels  bandwidth
    say      model  codecs  wire  common  errors       pure: bytes and arrays in, values out

Everything below the shells is handed its time, its randomness and its bytes.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import aiops
from tests.rows import each_row

# room: a folder or a file of aiops       the rooms that it may import from, beside itself
ARROWS: Mapping[str, str] = {
    "_version":       "",
    "errors":         "",
    "compiled":       "",
    "common":         "errors",
    "kernels":        "errors",
    "model":          "errors common",
    "codecs":         "errors common kernels model",
    "wire":           "errors common model",
    "state":          "errors common kernels model",
    "metrics":        "errors",
    "dashboard":      "metrics",
    "trackers":       "errors metrics",
    "tracing":        "_version errors common",
    "access":         "errors common wire",
    "algorithms":     "errors common kernels model",
    "bandwidth":      "errors common model wire algorithms",
    "store":          "errors common kernels model codecs",
    "engine":         "compiled errors common kernels model codecs wire state algorithms bandwidth"
                      " store filters",
    "durable":        "errors common kernels model wire algorithms store engine shards state",
    "shards":         "errors common kernels model codecs wire bandwidth algorithms store engine"
                      " filters",
    "filters":        "errors kernels model",
    "averaging":      "errors model codecs wire",
    "client":         "_version compiled errors common kernels model codecs wire algorithms"
                      " bandwidth averaging net tracing",
    "data":           "errors common model wire client",
    "net":            "compiled errors common kernels model wire bandwidth store",
    "serving":        "_version access compiled errors common kernels model wire algorithms"
                      " bandwidth store engine filters averaging shards net state durable metrics"
                      " dashboard trackers tracing",
    "sim":            "_version errors common kernels model codecs wire algorithms bandwidth store"
                      " engine net state serving client",
    "launch":         "_version errors common net client",
    "ray":            "errors common net client data state serving launch model wire shards",
    "testing":        "errors net serving sim",
    "lab":            "_version access errors common model codecs wire state algorithms bandwidth"
                      " store engine shards durable averaging net serving client data sim",
    "cli":            "_version access compiled errors common model wire state durable algorithms"
                      " bandwidth dashboard engine net serving client launch sim lab",
    "server":         "serving net cli",
    "__main__":       "net cli",
}  # fmt: skip

SHELLS = {
    "net",
    "serving",
    "client",
    "data",
    "launch",
    "ray",
    "sim",
    "testing",
    "lab",
    "cli",
    "server",
    "__main__",
    "trackers",
    "tracing",
}

PURE_IN_SHELLS: Mapping[str, str] = {
    "launch": "supervision program joining findings advice",
    "ray": "worker_group dealing checkpoint_list",
    "data": "feed order source",
    "tracing": "spans",
    "client": "params dlpack outbox coding encode_push receive_params rows request_kinds"
    " requests session logbook pending known_run restarts server_info handshake shard_channel"
    " shards strategies torch_arrays training_loop steady program calls backoff",
}
"""Modules (or packages) of a shell that are pure all the same."""

IMPURE = {
    *("asyncio", "socket", "threading", "time", "random", "secrets"),
    *("concurrent", "datetime", "multiprocessing", "queue", "sched", "select", "selectors"),
    *("signal", "ssl", "subprocess", "uuid"),
}
"""What nothing below the shells may import."""

EXTRAS: Mapping[str, str] = {
    "numba": "kernels.numba_jit",
    "torch": "data.torch client.strategies.torch_directions client.strategies.torch_graphs"
    " client.keras client.torch client.torch_arrays"
    " client.torch_embedding client.torch_params client.torch_replica client.torch_settings"
    " lab.experiments.adamw_workload lab.experiments.byte_text lab.experiments.click_tables"
    " lab.experiments.convnet lab.experiments.gpt lab.experiments.image_task lab.experiments.lstm"
    " lab.experiments.resnet lab.experiments.torch_task",
    "jax": "client.jax",
    "keras": "client.keras",
    "ray": "ray ray.context ray.data ray.job ray.running_server ray.servers ray.training"
    " ray.workers",
    "typer": "cli",
    "rich": "cli lab.demo.display",
    "threadpoolctl": "",
    "cryptography": "",
    "cupy": "",
    "grpc": "",
    "matplotlib": "",
    "ml_dtypes": "",
    "prometheus_client": "metrics.exposition",
    "pyarrow": "",
    "safetensors": "",
    "mlflow": "trackers.mlflow",
    "opentelemetry": "tracing.export",
    "tensorboard": "trackers.tensorboard",
    "trackio": "trackers.trackio",
    "wandb": "trackers.wandb",
    "uvloop": "",
    "zmq": "",
}
"""Packages that may be missing, and the modules that import them as they are imported.

``cli``: all commands; the modules that begin one do without (`WITHOUT_THE_COMMANDS`).
"""

WITHOUT_THE_COMMANDS = {"cli", "cli.starting", "cli.extras", "cli.exit_status"}

CORE = {"numpy", "msgpack"}
"""The packages without which aiops does not work."""

ROOT = Path(aiops.__file__).parent
MODULES = {
    ".".join(("aiops", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}


OTHERS = {"PIL", "atheris", "llvmlite", "pandas", "xxhash"}
"""Packages that come with another of an extra, or that only a function imports."""


def needy_modules(package: str) -> set[str]:
    """The modules that import a package of `EXTRAS` as they are imported."""
    names = EXTRAS[package].split()
    found = {f"aiops.{name}" for name in names}
    if "cli" in names:
        found |= {module for module in OURS if room_of(module) == "cli"}
        found -= {f"aiops.{name}" for name in WITHOUT_THE_COMMANDS}
    return found


def room_of(module: str) -> str:
    """The room of a module: the first name below aiops."""
    return module.split(".")[1]


def is_pure(module: str) -> bool:
    """Return True if a module may neither wait nor draw random numbers."""
    room, *rest = module.split(".")[1:]
    return room not in SHELLS or bool(rest and rest[0] in PURE_IN_SHELLS.get(room, "").split())


@functools.cache
def imports(path: Path, everywhere: bool = True) -> frozenset[str]:
    """The modules that a file imports; without ``everywhere`` those outside of functions."""
    found: set[str] = set()
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                found.add(whole if whole in MODULES else node.module)
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.extend(ast.iter_child_nodes(node))
    return frozenset(found)


OURS = [module for module in MODULES if module != "aiops"]
BELOW = [module for module in OURS if is_pure(module)]

CIRCLES: set[frozenset[str]] = set()
"""Circles among files that are still there: none may come, and those that go leave this list."""


class TestTable:
    def test_every_room_is_in_the_table(self) -> None:
        assert {room_of(module) for module in OURS} == set(ARROWS)

    def test_arrows_point_down(self) -> None:
        """No room can be reached from itself: the rooms below stand on their own."""
        order = list(ARROWS)
        reached = {room: set(below.split()) for room, below in ARROWS.items()}
        for _ in order:
            for room in order:
                reached[room] |= {far for near in reached[room] for far in reached[near]}
        assert not [room for room in order if room in reached[room]]

    def test_nothing_below_stands_on_a_shell(self) -> None:
        for room, below in ARROWS.items():
            assert room in SHELLS or not set(below.split()) & SHELLS

    def test_every_room_states_its_charter(self) -> None:
        """The first line of a room's ``__init__`` says what is in it."""
        for room in ARROWS:
            path = ROOT / room / "__init__.py"
            if (ROOT / room).is_dir():
                assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), room


class TestImports:
    @pytest.mark.parametrize("room", ARROWS)
    def test_a_module_imports_from_the_rooms_below(self, room: str) -> None:
        allowed = {room, *ARROWS[room].split()}
        for module in OURS:
            if room_of(module) == room:
                ours = {name for name in imports(MODULES[module]) if name.startswith("aiops.")}
                wrong = {name for name in ours if room_of(name) not in allowed}
                assert not wrong, f"{module}: {room!r} may import from {sorted(allowed)}"

    def test_no_circle_among_files(self) -> None:
        """Imports inside functions count: they hide a circle, and do not open it."""
        found = circles({m: set(imports(MODULES[m]) & set(OURS)) for m in OURS})
        assert found <= CIRCLES, "these import each other"
        assert found >= CIRCLES, "these circles are gone: take them out of CIRCLES"

    def test_nothing_below_the_shells_waits_or_draws_lots(self) -> None:
        for module in BELOW:
            packages = {name.partition(".")[0] for name in imports(MODULES[module])}
            assert not packages & IMPURE, module

    def test_nothing_below_the_shells_reaches_them_through_the_front_door(self) -> None:
        """``import aiops`` is for its version: the rest of what it offers are shells."""
        for module in BELOW:
            tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
            taken = {
                node.attr
                for node in ast.walk(tree)
                if isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "aiops"
            }
            assert taken <= {"__version__"}, module

    def test_what_may_be_missing_is_imported_where_it_is_needed(self) -> None:
        for module, path in MODULES.items():
            packages = {name.partition(".")[0] for name in imports(path, everywhere=False)}
            for package in packages & set(EXTRAS):
                assert module in needy_modules(package), module

    def test_all_else_is_the_core(self) -> None:
        """Two packages, and what Python has: each other one is of an extra (pyproject.toml)."""
        for module, path in MODULES.items():
            packages = {name.partition(".")[0] for name in imports(path)}
            foreign = packages - set(sys.stdlib_module_names) - {"aiops", "benchmarks"}
            assert foreign <= CORE | set(EXTRAS) | OTHERS, module

    @each_row("package", EXTRAS)
    def test_who_needs_such_a_package_is_imported_only_when_needed(self, package: str) -> None:
        needy = needy_modules(package)
        for module in MODULES:
            if module not in needy:
                assert not needy & imports(MODULES[module], everywhere=False), module

    def test_this_test_sees_imports(self) -> None:
        """The parsing itself, on modules that are known to import in several ways."""
        assert "aiops.errors" in imports(MODULES["aiops.wire.connection"])
        assert "ml_dtypes" in imports(MODULES["aiops.model.layout"])
        assert "ml_dtypes" not in imports(MODULES["aiops.model.layout"], everywhere=False)
        assert "asyncio" in imports(MODULES["aiops.serving.server"])

    def test_this_test_sees_circles(self) -> None:
        graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a", "d"}}
        assert circles(graph) == {frozenset("bc")}


def circles(graph: Mapping[str, set[str]]) -> set[frozenset[str]]:
    """The sets of modules that can reach each other."""
    reached: dict[str, set[str]] = {}
    for module in graph:
        seen: set[str] = set()
        stack = list(graph[module])
        while stack:
            name = stack.pop()
            if name not in seen:
                seen.add(name)
                stack += graph.get(name, ())
        reached[module] = seen
    groups = {
        frozenset(other for other in graph if other in reached[module] and module in reached[other])
        for module in graph
    }
    return {group for group in groups if len(group) > 1}


def loaded_by(code: str) -> set[str]:
    """The top-level packages that a fresh interpreter has loaded after some code."""
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    run = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True
    )
    return set(run.stdout.split())


class TestPublicNames:
    def test_importing_aiops_costs_next_to_nothing(self) -> None:
        heavy = {"asyncio", "numpy", "msgpack", "typer", "rich", "socket", *EXTRAS}
        assert not loaded_by("import aiops; dir(aiops)") & heavy

    @pytest.mark.parametrize("name", ["Client", "AsyncClient", "Worker", "serve", "errors"])
    def test_no_public_name_needs_what_may_be_missing(self, name: str) -> None:
        assert not loaded_by(f"import aiops; aiops.{name}") & set(EXTRAS)

    @pytest.mark.parametrize("module", ["aiops", "aiops.client", "aiops.errors", "aiops.kernels"])
    def test_every_public_name_resolves_and_has_a_docstring(self, module: str) -> None:
        home = importlib.import_module(module)
        assert inspect.getdoc(home)
        for name in home.__all__:
            value = getattr(home, name)
            if callable(value) or inspect.ismodule(value):
                assert inspect.getdoc(value), f"{module}.{name}"
            assert name in dir(home)

    def test_a_name_that_is_none(self) -> None:
        with pytest.raises(AttributeError, match="module 'aiops' has no attribute 'Clinet'"):
            aiops.Clinet  # type: ignore[attr-defined]  # noqa: B018
