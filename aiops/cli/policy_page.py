"""The pages of algorithms and topics as Markdown, for the terminal and for docs/algorithms."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Sequence

from aiops.algorithms.base import Algorithm
from aiops.cli import policy_catalog, policy_docstring
from aiops.cli.policy_catalog import OWN, SettingGroup, grouped
from aiops.cli.policy_docstring import DocBlock

_SETTINGS = "Settings"


class PageWriter:
    """Writes pages.

    Parameters
    ----------
    link
        From the name in a reference to the Markdown in its place; None: show it as code.
    """

    def __init__(self, link: Callable[[str], str | None]) -> None:
        self._link = link

    def algorithm(self, name: str, kind: type[Algorithm], *top: str) -> list[str]:
        """Return an algorithm's page, part by part; ``top`` stands below its title."""
        page, known = policy_docstring.read(kind.__doc__), policy_catalog.facts(kind)
        facts = [
            ("a worker", known.worker),
            ("waits for", known.waits_for),
            ("the server keeps, for each parameter", known.memory),
            ("exchanges beside computing", known.overlap),
        ]
        parts = [
            f"# `{name}`",
            *top,
            self.inline(page.summary or "It has no docstring."),
            *map(self._block, page.body),
            table(("with the default settings", ""), facts),
            f"```console\n$ {policy_catalog.command(name, kind)}\n```",
            f"## {_SETTINGS}",
            "Given as `--set key=value`.",
            *map(self._group, grouped(kind)),
        ]
        for heading, blocks in page.sections.items():
            if heading == "Example":
                blocks = [_with_import(kind, blocks[0]), *blocks[1:]]
            if heading != _SETTINGS:
                parts += [f"## {heading}", *map(self._block, blocks)]
        return parts

    def topic(self, topic: str, *top: str) -> list[str]:
        """Return the page of what several algorithms share, part by part."""
        module = importlib.import_module(policy_catalog.TOPICS[topic])
        page = policy_docstring.read(module.__doc__)
        parts = [f"# {topic.capitalize()}", *top, self.inline(page.summary)]
        parts += map(self._block, page.body)
        for heading, blocks in page.sections.items():
            parts += [f"## {heading}", *map(self._block, blocks)]
        return parts

    def inline(self, text: str) -> str:
        """Return a text of a docstring as Markdown."""
        return policy_docstring.marked(text, self._link)

    def _group(self, group: SettingGroup) -> str:
        rows = [
            (
                f"`{s.name}`",
                f"`{s.default}`" if s.default != "" else "",
                s.type,
                self.inline(s.meaning),
            )
            for s in group.settings
        ]
        shown = table(("setting", "default", "type", "meaning"), rows)
        return shown if group.title == OWN else f"### {group.title}\n\n{shown}"

    def _block(self, block: DocBlock) -> str:
        if block.kind == "table":
            head, *rows = ([self.inline(cell) for cell in row] for row in block.rows)
            return table(head, rows)
        if block.kind == "text":
            return self.inline(block.text)
        language = {"example": "pycon", "math": "text", "code": "text"}[block.kind]
        return f"```{language}\n{block.text}\n```"


def joined(parts: Iterable[str]) -> str:
    """Return the parts of a page as its text; empty ones are left out."""
    return "\n\n".join(part for part in parts if part) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)


def _with_import(kind: type[Algorithm], block: DocBlock) -> DocBlock:
    """Return an example with the import that it needs to run where a reader pastes it."""
    line = f">>> from {kind.__module__} import {kind.__name__}"
    return DocBlock(block.kind, f"{line}\n{block.text}") if block.kind == "example" else block
