"""The results file: one row per run, so that a measurement that was cut short can be resumed."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiops
from aiops.lab.run_record import record, write_rows

SECTIONS = ("runs", "idle", "straggler")

_ASIDE = ("cli/", "lab/demo/", "lab/experiments/", "sim/", "testing.py")
"""The parts of aiops that no result depends on."""

Row = dict[str, Any]


class AlgorithmResults:
    """The rows of a file, in sections; a row is found again by what it is a measurement of.

    Raises
    ------
    ValueError
        When the file is there and is not JSON.
    """

    def __init__(self, path: Path | None, task: Mapping[str, Any], code: str) -> None:
        self.path, self.code = path, code
        before = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        same = before.get("task") == dict(task)
        rows = {section: before.get(section, []) if same else [] for section in SECTIONS}
        self._content = record("benchmark", "algorithms", {}, {"task": dict(task), **rows})

    def __getitem__(self, section: str) -> list[Row]:
        """Return the rows of a section."""
        rows: list[Row] = self._content[section]
        return rows

    @property
    def content(self) -> Mapping[str, Any]:
        """All of it, as written."""
        return self._content

    def find(self, section: str, key: Mapping[str, Any]) -> Row | None:
        """Return the row that is a measurement of ``key`` with the same code, if there is one."""
        for row in self[section]:
            if row["code"] == self.code and _matches(row, key):
                return row
        return None

    def put(self, section: str, key: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        """Add a row, in the place of an older one; write the file."""
        fresh = {**key, **row, "code": self.code}
        rows = self[section]
        for place, old in enumerate(rows):
            if _matches(old, key):
                rows[place] = fresh
                break
        else:
            rows.append(fresh)
        if self.path is not None:
            write_rows(self.path, self._content)


def _matches(row: Mapping[str, Any], key: Mapping[str, Any]) -> bool:
    return all(name in row and row[name] == value for name, value in key.items())


def fingerprint(root: Path | None = None) -> str:
    """Return a short hash of the code that results depend on; comments and docstrings are not."""
    root = root or Path(aiops.__file__).parent
    seen = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_ASIDE):
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                node.body = [statement for statement in node.body if not _is_text(statement)]
        seen.update(f"{name}\n{ast.dump(tree)}\n".encode())
    return seen.hexdigest()[:12]


def _is_text(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )
