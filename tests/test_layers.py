"""Arrows point down: which module may import which, as a table that mirrors the design.

::

    shells   server  client  tools                    await, sockets, threads, clocks, entropy
    decide   engine          conversation
    know     algorithms  store  kernels
    say      wire  layout  messages  errors           pure: bytes and arrays in, values out

Everything below the shells is handed its time, its randomness and its bytes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import aiops

# room              its modules (under aiops; a package means all in it)
ROOMS: Mapping[str, str] = {
    "errors":       "errors address values words plain imports closing",
    "budget":       "bucket controller rates",
    "messages":     "fields messages decoding",
    "layout":       "layout arena tables segments shards.placement",
    "wire":         "wire handshake lending sinks states traffic compiled",
    "ledger":       "ledger tally",
    "kernels":      "kernels",
    "codecs":       "codecs",
    "store":        "machine gradients versions places stepping ondevice shadow store rows"
                    " preparing",
    "algorithms":   "algorithms gates",
    "engine":       "crew events pool incoming intake definition fitness recall shadowing answers"
                    " updates meeting rowsintake rowsdesk engine statistics journal shards",
    "conversation": "client.params client.foreign client.leased client.outbox client.coding"
                    " client.outgoing client.incoming client.rows client.requests client.dialogue"
                    " client.branch client.shards client.conversation client.transfer",
    "routines":     "client.routines client.steps",
    "collective":   "collective",
    "workloads":    "workloads",
    "sockets":      "sockets lookup spin applier surroundings samehost hands signals processors"
                    " cuda yielding",
    "client":       "client",
    "server":       "server process leash nearby connections performer profiling link paced pacing"
                    " peer config files newfiles ledgerfile keeping shards.links shards.children",
    "tools":        "cli __main__ accounts throttle commands demo pages wire_examples sim testing"
                    " experiments",
}  # fmt: skip

# room              the rooms that it may import from, beside itself
ARROWS: Mapping[str, str] = {
    "errors":       "",
    "budget":       "errors",
    "messages":     "errors",
    "layout":       "errors messages",
    "wire":         "errors messages layout",
    "ledger":       "errors messages layout wire",
    "kernels":      "errors",
    "codecs":       "errors layout kernels",
    "store":        "errors messages layout kernels codecs",
    "algorithms":   "errors layout kernels",
    "engine":       "errors budget messages layout wire ledger kernels codecs store algorithms",
    "conversation": "errors messages layout wire ledger kernels codecs",
    "routines":     "errors layout ledger kernels codecs algorithms conversation",
    "collective":   "errors messages layout wire",
    "workloads":    "errors",
    "sockets":      "errors messages layout wire kernels",
    "client":       "errors messages layout wire ledger codecs conversation routines collective"
                    " sockets",
    "server":       "errors budget messages layout wire ledger codecs store algorithms engine"
                    " sockets",
    "tools":        "errors budget messages layout wire ledger kernels codecs store algorithms"
                    " engine conversation routines collective workloads sockets client server",
}  # fmt: skip

SHELLS = {"sockets", "client", "server", "tools"}
ASIDE = {"workloads"}  # it reads files and downloads them, and nothing else of aiops needs it

IMPURE = {
    *("asyncio", "socket", "threading", "time", "random", "secrets"),
    *("concurrent", "datetime", "multiprocessing", "queue", "sched", "select", "selectors"),
    *("signal", "ssl", "subprocess", "uuid"),
}
"""What nothing below the shells may import."""

EXTRAS: Mapping[str, str] = {
    "numba": "kernels.jit_cpu kernels.scan_cpu kernels.rows_cpu codecs.half_cpu codecs.int8_cpu"
    " codecs.lowrank_cpu codecs.onebit_cpu codecs.topk_cpu",
    "torch": "client.torch client.torch_params client.torch_replica experiments.convnet",
    "jax": "client.jax",
    "cupy": "",
    "grpc": "",
    "matplotlib": "",
    "ml_dtypes": "",
    "safetensors": "",
    "uvloop": "",
    "zmq": "",
}
"""Packages that may be missing, and the modules that import them as they are imported."""

ENTRANCES = {("aiops.server", "aiops.cli.main")}
"""``python -m aiops.server`` is the command line's; the import runs only then."""

ROOT = Path(aiops.__file__).parent
MODULES = {
    ".".join(("aiops", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(ROOT.rglob("*.py"))
}


def room_of(module: str) -> str | None:
    """The room of a module: that of the longest name that fits."""
    found = None
    longest = 0
    for room, members in ROOMS.items():
        for member in members.split():
            name = f"aiops.{member}"
            if (module == name or module.startswith(f"{name}.")) and len(name) > longest:
                found, longest = room, len(name)
    return found


def imports(path: Path, everywhere: bool = True) -> Iterator[str]:
    """The modules that a file imports; without ``everywhere`` those outside of functions."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute here"
            assert node.module is not None
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else node.module
        if everywhere or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes.extend(ast.iter_child_nodes(node))


OURS = [module for module in MODULES if module != "aiops"]
BELOW = [m for m in OURS if room_of(m) not in SHELLS | ASIDE]


class TestTable:
    def test_every_module_has_a_room(self) -> None:
        homeless = [module for module in OURS if room_of(module) is None]
        assert not homeless, "say in ROOMS where these belong"

    def test_arrows_point_down(self) -> None:
        """No room can be reached from itself: the rooms below stand on their own."""
        assert set(ARROWS) == set(ROOMS)
        above: set[str] = set()
        for room, below in ARROWS.items():
            assert set(below.split()) <= above, f"{room} stands on what is not below it"
            above.add(room)

    def test_nothing_below_stands_on_a_shell(self) -> None:
        for room, below in ARROWS.items():
            assert room in SHELLS or not set(below.split()) & (SHELLS | ASIDE)


class TestImports:
    @pytest.mark.parametrize("module", OURS)
    def test_a_module_imports_from_the_rooms_below(self, module: str) -> None:
        room = room_of(module)
        assert room is not None
        allowed = {room, *ARROWS[room].split()}
        wrong = {
            name
            for name in imports(MODULES[module])
            if name.startswith("aiops.")
            and room_of(name) not in allowed
            and (module, name) not in ENTRANCES
        }
        assert not wrong, f"{module} is in {room!r}, which may import from {sorted(allowed)}"

    @pytest.mark.parametrize("module", BELOW)
    def test_nothing_below_the_shells_waits_or_draws_lots(self, module: str) -> None:
        packages = {name.partition(".")[0] for name in imports(MODULES[module])}
        assert not packages & IMPURE

    @pytest.mark.parametrize("module", BELOW)
    def test_nothing_below_the_shells_reaches_them_through_the_front_door(
        self, module: str
    ) -> None:
        """``import aiops`` is for its version: the rest of what it offers are shells."""
        tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
        taken = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "aiops"
        }
        assert taken <= {"__version__"}

    @pytest.mark.parametrize("module", MODULES)
    def test_what_may_be_missing_is_imported_where_it_is_needed(self, module: str) -> None:
        packages = {name.partition(".")[0] for name in imports(MODULES[module], everywhere=False)}
        for package in packages & set(EXTRAS):
            assert module.removeprefix("aiops.") in EXTRAS[package].split()

    @pytest.mark.parametrize("package", EXTRAS)
    def test_who_needs_such_a_package_is_imported_only_when_needed(self, package: str) -> None:
        needy = {f"aiops.{name}" for name in EXTRAS[package].split()}
        for module in MODULES:
            if module not in needy:
                assert not needy & set(imports(MODULES[module], everywhere=False)), module

    def test_this_test_sees_imports(self) -> None:
        """The parsing itself, on a module that is known to import in several ways."""
        assert "aiops.errors" in set(imports(MODULES["aiops.wire.connection"]))
        assert {"aiops.wire.messages", "hmac"} <= set(imports(MODULES["aiops.wire.handshake"]))
        assert "ml_dtypes" in set(imports(MODULES["aiops.model.layout"]))
        assert "ml_dtypes" not in set(imports(MODULES["aiops.model.layout"], everywhere=False))
        assert "asyncio" in set(imports(MODULES["aiops.server"]))
        for module, entrance in ENTRANCES:
            assert entrance in set(imports(MODULES[module]))
        assert room_of("aiops.client.conversation") == "conversation"
        assert room_of("aiops.client.blocking") == "client"
        assert room_of("aiops.wired") is None


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
