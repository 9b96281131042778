"""What guides and examples use of aiops is on docs/api.md, as public or as provisional."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from docs._tools.api.surface import CORE, INTERNAL, PROVISIONAL, provisional
from tests.rows import each_row

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
FILES = sorted(
    path
    for folder in ("examples", "deploy")
    for kind in ("*.py", "*.ipynb")
    for path in (ROOT / folder).rglob(kind)
)
MADE = {"serve": "Server"}
"""What functions of aiops give in a ``with``: classes give their own objects."""


def public() -> Mapping[str, frozenset[str]]:
    """The names of each module on the page, and the provisional ones."""
    found: dict[str, frozenset[str]] = dict(provisional())
    listed = re.findall(r"^### `(aiops[\w.]*)`\n\n```text\n(.*?)```", PAGE, re.M | re.S)
    for module, names in listed:
        own = re.findall(r"^(?:class )?(\w+)", names, re.MULTILINE)
        found[module] = frozenset(own) | found.get(module, frozenset())
    # `serve` stands where it is first: it is of aiops and of aiops.server.
    found["aiops.server"] |= {"serve"}
    return found


PUBLIC = public()


def faults(source: str) -> Iterator[str]:
    """Yield each use of aiops in a program that is not on the page."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # parts of a program, of which the imports are read
        tree = ast.parse(
            "".join(re.findall(r"^ *((?:from|import) aiops.*\n)", source, re.MULTILINE))
        )
    yield from dict.fromkeys(_faults(tree))


def _faults(tree: ast.Module) -> Iterator[str]:
    modules: dict[str, str] = {}  # what a name stands for: a module
    objects: dict[str, str] = {}  # and the class of an object
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                if each.name.partition(".")[0] == "aiops":
                    name = each.asname or "aiops"
                    modules[name] = each.name if each.asname else "aiops"
                    if each.name not in PUBLIC:
                        yield f"import {each.name}"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "aiops":
            for each in node.names:
                whole = f"{node.module}.{each.name}"
                if whole in PUBLIC:
                    modules[each.asname or each.name] = whole
                elif each.name not in PUBLIC.get(node.module or "", ()):
                    yield f"from {node.module} import {each.name}"
        elif isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            objects[node.optional_vars.id] = _made(node.context_expr)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            objects[node.targets[0].id] = _made(node.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield from _attribute(node, modules, objects)


def _made(call: ast.expr) -> str:
    """Return the class of what a call gives, if that is one of these; or its name."""
    made = call.func if isinstance(call, ast.Call) else None
    name = getattr(made, "attr", getattr(made, "id", ""))
    return MADE.get(name, name)


def _attribute(
    node: ast.Attribute, modules: Mapping[str, str], objects: Mapping[str, str]
) -> Iterator[str]:
    parts = [node.attr]
    below: ast.expr = node.value
    while isinstance(below, ast.Attribute):
        parts.append(below.attr)
        below = below.value
    if not isinstance(below, ast.Name):
        return
    module, name = modules.get(below.id), parts.pop()
    if module is not None:
        while f"{module}.{name}" in PUBLIC and parts:
            module, name = f"{module}.{name}", parts.pop()
        if f"{module}.{name}" not in PUBLIC and name not in PUBLIC.get(module, ()):
            yield f"{module}.{name}"
    elif name in INTERNAL.get(objects.get(below.id, ""), "").split():
        yield f"{objects[below.id]}.{name}"


def programs(path: Path) -> Iterator[str]:
    """Yield the programs of a page, a notebook or a file."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        yield text
    elif path.suffix == ".ipynb":
        cells = [each for each in json.loads(text)["cells"] if each["cell_type"] == "code"]
        yield "\n".join("".join(each["source"]) for each in cells)
    else:
        for kind, block in re.findall(r"```(python|pycon)[^\n]*\n(.*?)```", text, re.DOTALL):
            yield doctest.script_from_examples(block) if kind == "pycon" else block


@each_row("path", [*PAGES, *FILES], ids=lambda path: str(path.relative_to(ROOT)))
def test_its_programs_use_what_is_public(path: Path) -> None:
    found = [fault for program in programs(path) for fault in faults(program)]
    assert not found, "not on docs/api.md: name it there, or use what is there"


@each_row(
    ("source", "found"),
    [
        ("import aiops\naiops.Worker", []),
        ("import aiops.client\naiops.client.ModelAverager", []),
        ("from aiops.client import ModelAverager", []),
        ("from aiops import testing\ntesting.run", []),
        ("from aiops.server import Server, StandbyServer, serve", []),
        ("from aiops.algorithms.base import IGNORE, Decision", []),
        ("from aiops.algorithms.ssp import SSP", []),
        ("from aiops.serving.config import Config", ["from aiops.serving.config import Config"]),
        ("import aiops.engine.engine", ["import aiops.engine.engine"]),
        ("import aiops\naiops.client.session.Session", ["aiops.client.session"]),
        ("import aiops as a\na.serving", ["aiops.serving"]),
        ("from aiops import testing\ntesting.LIMIT", ["aiops.testing.LIMIT"]),
        ("from aiops.algorithms.ssp import Cap", ["from aiops.algorithms.ssp import Cap"]),
        ("with aiops.serve() as s:\n s.url\n s.engine.report()", ["Server.engine"]),
        ("with aiops.Worker(u) as w:\n w.step(g)\n w.plan", ["Worker.plan"]),
        ("w = aiops.Worker(u)\nw.plan", ["Worker.plan"]),
        ("from aiops.wire import Push  # a part\n    of_it()", ["from aiops.wire import Push"]),
    ],
)
def test_a_program_is_judged(source: str, found: list[str]) -> None:
    assert list(faults(source)) == found


def test_programs_are_found() -> None:
    """In pages, in their consoles of Python, in notebooks and in files."""
    names = ("testing.md", "ssp.md", "quickstart.ipynb", "train.py")
    for name in names:
        [path] = [each for each in (*PAGES, *FILES) if each.name == name]
        assert any("import aiops" in text or "from aiops" in text for text in programs(path))


def test_the_page_names_what_is_provisional() -> None:
    section = PAGE.partition("### Provisional")[2].partition("\n## ")[0]
    named = set(re.findall(r"`([\w.]+)`", section))
    for module, names in PROVISIONAL.items():
        if names == "*":
            assert module in named
        for name in names.replace("*", "").split():
            assert {name, module} <= named or f"{module}.{name}" in named, f"{module}.{name}"
    known = {part for module, names in PROVISIONAL.items() for part in (module, *names.split())}
    whole = {f"{module}.{name}" for module, names in PROVISIONAL.items() for name in names.split()}
    assert named <= known | whole


def test_what_is_provisional_is_there_and_is_not_public() -> None:
    for module, names in provisional().items():
        try:
            home = importlib.import_module(module)
        except ModuleNotFoundError as error:  # of a package that is not installed
            if str(error.name).startswith("aiops"):
                raise
            continue
        assert names, module
        assert all(hasattr(home, name) for name in names), module
        assert module not in CORE
