"""Parser of docstrings: paragraphs, formulas, tables, examples and sections."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["text", "math", "code", "table", "example"]

_MATH = ".. math::"
_RULED = re.compile(r"=+( +=+)*$")
_REFERENCE = re.compile(r"(?<!`)`([^`]+)`(?!`)")


@dataclass(frozen=True)
class DocBlock:
    """One block of a docstring.

    Attributes
    ----------
    kind
        Its kind.
    text
        A paragraph as one line; formulas, code and examples with their lines.
    rows
        The cells of a table, the header first.
    """

    kind: Kind
    text: str = ""
    rows: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class DocPage:
    """A docstring: its first line, the blocks after it, and its sections by heading."""

    summary: str
    body: list[DocBlock] = field(default_factory=list)
    sections: Mapping[str, list[DocBlock]] = field(default_factory=dict)


def read(docstring: str | None) -> DocPage:
    """Return the parts of a docstring; an empty one has none.

    >>> page = read('''It halves.
    ...
    ... .. math:: θ ← θ/2
    ...
    ... Source
    ... ------
    ... Euclid.
    ... ''')
    >>> page.summary, page.body[0].text, page.sections["Source"][0].text
    ('It halves.', 'θ ← θ/2', 'Euclid.')
    """
    lines = inspect.cleandoc(docstring or "").splitlines()
    if not lines:
        return DocPage("")
    parts: dict[str, list[str]] = {"": []}
    heading = ""
    for number, line in enumerate(lines[1:], 1):
        following = lines[number + 1] if number + 1 < len(lines) else ""
        if line and set(following) == {"-"}:
            heading = line
            parts[heading] = []
        elif not (set(line) == {"-"} and lines[number - 1] == heading):
            parts[heading].append(line)
    sections = {name: _blocks(text) for name, text in parts.items()}
    return DocPage(lines[0], sections.pop(""), sections)


def summary(kind: type) -> str:
    """Return the first line of a class's docstring."""
    return (inspect.getdoc(kind) or "").partition("\n")[0]


def _blocks(lines: list[str]) -> list[DocBlock]:
    found: list[DocBlock] = []
    at = 0
    while at < len(lines):
        if not lines[at].strip():
            at += 1
            continue
        make, end = _next(lines, at)
        found.append(make(lines[at:end]))
        at = end
    return found


def _next(lines: list[str], at: int) -> tuple[Callable[[list[str]], DocBlock], int]:
    """Return the parser of the block that begins at a line, and the line after it."""
    line = lines[at]
    if line.startswith(_MATH):
        return _math, _indented(lines, at + 1)
    if line.startswith(" "):
        return _code, _indented(lines, at)
    if _RULED.match(line):
        rules = [number for number in range(at, len(lines)) if _RULED.match(lines[number])]
        return _table, rules[min(2, len(rules) - 1)] + 1
    end = at
    while end < len(lines) and lines[end].strip():
        end += 1
    return (_example if line.startswith(">>>") else _text), end


def _indented(lines: list[str], at: int) -> int:
    """Return the line after the indented lines and the empty ones among them."""
    while at < len(lines) and (not lines[at].strip() or lines[at].startswith(" ")):
        at += 1
    return at


def _text(lines: list[str]) -> DocBlock:
    return DocBlock("text", " ".join(line.strip() for line in lines).removesuffix("::"))


def _math(lines: list[str]) -> DocBlock:
    inline = lines[0].removeprefix(_MATH).strip()
    rest = textwrap.dedent("\n".join(lines[1:])).strip("\n")
    return DocBlock("math", "\n".join(part for part in (inline, rest) if part))


def _code(lines: list[str]) -> DocBlock:
    return DocBlock("code", textwrap.dedent("\n".join(lines)).strip("\n"))


def _example(lines: list[str]) -> DocBlock:
    return DocBlock("example", "\n".join(lines))


def _table(lines: list[str]) -> DocBlock:
    """Read a table; its rules give the columns, a row without a first cell continues the last."""
    starts = [match.start() for match in re.finditer("=+", lines[0])]
    bounds = list(zip(starts, [*starts[1:], None], strict=True))
    rows: list[list[str]] = []
    for line in lines:
        if _RULED.match(line):
            continue
        cells = [line[begin:end].strip() for begin, end in bounds]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{a} {b}".strip() for a, b in zip(rows[-1], cells, strict=True)]
    return DocBlock("table", rows=tuple(map(tuple, rows)))


# ---------------------------------------------------------------- markup within a line


def plain(text: str) -> str:
    """Return a text without markup, except that of titles: ``*...*``."""
    text = _REFERENCE.sub(r"\1", text)
    return re.sub(r"\\(.)", r"\1", text.replace("``", ""))


def marked(text: str, link: Callable[[str], str | None]) -> str:
    """Return a text as Markdown.

    Parameters
    ----------
    text
        Of a docstring: ````code````, ```Reference```, ``*title*``.
    link
        From the name in a reference to the Markdown in its place; None: show it as code.
    """
    text = _REFERENCE.sub(lambda match: link(match[1]) or f"``{match[1]}``", text)
    return text.replace("``", "`")
