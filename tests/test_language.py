"""The language of CONTRIBUTING.md, held: words that are not used, and how a summary line begins."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

BANNED = re.compile(
    r"\b(?:nobody|somebody|anybody|everybody|whoever|whomever|so many|whose turn|errand|shelf"
    r"|spoilt|forsake|leash)\b",
    re.IGNORECASE,
)
"""Machines are not people, a number has a name, and a thing has one name."""

PRIVATE = frozenset(
    (
        *("anew", "crumb", "dialled", "foreseen", "glimpses", "heard", "let_go", "news"),
        *("onlookers", "shadow", "upright", "wish"),
    )
)
"""Names that say nothing to a reader who does not know the code; underscores are not counted."""

OPENING = re.compile(r"(?:What|Who|Whose|Whom|Whether|Where|Which|When|How)\b")
"""A summary line names the thing; it is not half of a question."""

UNMERGED = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)
"""What Git leaves where two versions of a line meet."""

LEFT: dict[str, int] = {}
"""Places that still break the rules, by room: a number may only go down."""


def room_of(path: Path) -> str:
    """The room that a file counts for."""
    parts = path.relative_to(ROOT).parts
    if parts[0] != "aiops":
        return parts[0] if len(parts) > 1 else "pages"
    return parts[1].removesuffix(".py")


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Comments and string literals, with their lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield from enumerate(token.string.splitlines(), token.start[0])


class Names(NamedTuple):
    """What a module names: with lines, but for the classes."""

    summaries: list[tuple[int, str]]  # the first lines of docstrings
    classes: list[str]
    private: list[tuple[int, str]]  # names of `PRIVATE` that it defines or uses


@cache
def names_of(path: Path) -> Names:
    """Walk a module's syntax tree, which takes long, for all tests at once."""
    found = Names([], [], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        line = getattr(node, "lineno", 1)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.summaries.append((line, text.splitlines()[0]))
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        for field in ("name", "arg", "attr", "id"):
            name = getattr(node, field, None)
            if isinstance(name, str) and name.strip("_") in PRIVATE:
                found.private.append((line, name))
    return found


def faults(path: Path) -> Iterator[str]:
    """What a file has that it should not."""
    where = path.relative_to(ROOT)
    for found in UNMERGED.finditer(path.read_text(encoding="utf-8")):
        yield f"{where}: two versions that were not merged: {found.group()!r}"
    # To split a file into tokens takes long, and nearly no file has such a word anywhere.
    for number, line in prose(path) if BANNED.search(path.read_text(encoding="utf-8")) else ():
        for found in BANNED.finditer(line):
            yield f"{where}:{number}: {found.group()!r} in {line.strip()!r:.100}"
    if path.suffix == ".py":
        for number, line in names_of(path).summaries:
            if OPENING.match(line):
                yield f"{where}:{number}: a summary line begins as a question: {line!r:.100}"


def written() -> dict[str, list[Path]]:
    """All files, by room."""
    paths = [
        *(ROOT / "aiops").rglob("*.py"),
        *(ROOT / "benchmarks").rglob("*.py"),
        *(ROOT / "examples").rglob("*.py"),
        *(ROOT / "deploy").rglob("*.py"),
        *(ROOT / "docs" / "_tools").rglob("*.py"),
        *ROOT.glob("*.md"),
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "docs" / "algorithms").glob("*.md"),
        *(ROOT / "docs" / "frameworks").glob("*.md"),
    ]
    found: dict[str, list[Path]] = {}
    for path in sorted(paths):
        if path.name != "CONTRIBUTING.md":  # it lists the words
            found.setdefault(room_of(path), []).append(path)
    return found


WRITTEN = written()


@pytest.mark.parametrize("room", WRITTEN)
def test_the_language_of_a_room(room: str) -> None:
    limit = LEFT.get(room, 0)
    found = [fault for path in WRITTEN[room] for fault in faults(path)]
    shown = "\n".join(found)
    assert len(found) <= limit, f"CONTRIBUTING.md, Language:\n{shown}"
    assert len(found) == limit, f"fewer than {limit}: lower the number in LEFT"


MODULES = sorted((ROOT / "aiops").rglob("*.py"))


def test_no_two_classes_have_one_name() -> None:
    counts = Counter(name for path in MODULES for name in names_of(path).classes)
    assert counts["Engine"] == 1
    twice = {name for name, count in counts.items() if count > 1}
    assert not twice, "give one of them another name"


def test_no_private_names() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, name in names_of(path).private
    ]
    assert not found, "name the value or the action in the field's words"


def test_names_are_found(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""What\n"""\n\nclass A:\n    def anew(self, news): _news.news\n'
    )
    found = names_of(tmp_path / "module.py")
    assert found.summaries == [(1, "What")]
    assert found.classes == ["A"]
    assert sorted(found.private) == [(5, "_news"), (5, "anew"), (5, "news"), (5, "news")]


def test_this_test_sees_them() -> None:
    assert Counter(m.group() for m in BANNED.finditer("Nobody is so many; a shelf")) == {
        "Nobody": 1, "so many": 1, "shelf": 1
    }  # fmt: skip
    assert OPENING.match("What is there")
    assert not OPENING.match("Whatever")
