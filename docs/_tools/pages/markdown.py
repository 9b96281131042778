"""docs/algorithms: a page per algorithm and topic, and the index."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from aiops.algorithms.base import Algorithm
from aiops.cli import policy_catalog, policy_docstring
from aiops.cli.policy_catalog import TOPICS, built_in, facts, families, neighbours
from aiops.cli.policy_docstring import DocBlock, summary
from aiops.cli.policy_settings import OWN, SettingGroup, described, grouped
from docs._tools.pages.curves import Curves

_REPOSITORY = "../.."  # of the pages' folder
_SETTINGS = "Settings"


def pages(curves: Curves | None = None) -> dict[str, str]:
    """Return the text of every page by the name of its file.

    Parameters
    ----------
    curves
        Measured learning curves; with none, no page shows a plot.
    """
    kinds = built_in()
    found = {f"{name}.md": algorithm_page(name, kinds[name], curves) for name in sorted(kinds)}
    found.update({f"{topic}.md": topic_page(topic) for topic in TOPICS})
    return {"README.md": index_page(curves), **found}


def algorithm_page(name: str, kind: type[Algorithm], curves: Curves | None = None) -> str:
    """Return an algorithm's page."""
    page, known = policy_docstring.read(kind.__doc__), facts(kind)
    lines = [
        f"# `{name}`",
        _generated(kind.__module__),
        _inline(page.summary),
        *_blocks(page.body),
        _table(
            ("with the default settings", ""),
            [
                ("a worker", known.worker),
                ("waits for", known.waits_for),
                ("the server keeps, for each parameter", known.memory),
            ],
        ),
        f"```console\n$ {policy_catalog.command(name, kind)}\n```",
        f"## {_SETTINGS}",
        "Given as `--set key=value`.",
        *(_group(group) for group in grouped(kind)),
    ]
    for heading, blocks in page.sections.items():
        if heading == _SETTINGS:
            continue
        if heading == "Example":
            blocks = [_imported(kind, blocks[0]), *blocks[1:]]
        lines += [f"## {heading}", *_blocks(blocks)]
    return _joined([*lines, *_neighbours(name, kind, curves)])


def topic_page(topic: str) -> str:
    """Return the page of what several algorithms share."""
    page = policy_docstring.read(importlib.import_module(TOPICS[topic]).__doc__)
    lines = [f"# {topic.capitalize()}", _generated(TOPICS[topic]), _inline(page.summary)]
    lines += _blocks(page.body)
    for heading, blocks in page.sections.items():
        lines += [f"## {heading}", *_blocks(blocks)]
    users = [f"[`{name}`]({name}.md)" for name in sorted(_users(topic))]
    return _joined([*lines, "## Who has them", ", ".join(users) + "."])


def index_page(curves: Curves | None = None) -> str:
    """Return the table of all algorithms."""
    kinds = built_in()
    lines = [
        "# The algorithms",
        _generated("aiops.algorithms"),
        "The server's `--policy NAME` chooses one; workers need no flags. `aiops policies NAME`"
        " shows these pages in the terminal. What is said of waiting, workers and memory holds for"
        f" the default settings and {policy_catalog.WORKERS} workers; memory is in arrays of the"
        " model's size, at the server, besides the parameters themselves.",
    ]
    head = ("`--policy`", "in one line", "waits for", "a worker", "memory")
    for family, names in families(kinds).items():
        rows = []
        for name in names:
            known = facts(kinds[name])
            link = f"[`{name}`]({name}.md)"
            first = _inline(summary(kinds[name]))
            rows.append((link, first, known.waits_for, known.worker, known.memory))
        lines += [f"## {family.capitalize()}", policy_catalog.FAMILIES.get(family, "")]
        lines.append(_table(head, rows))
    topics = [f"[{topic}]({topic}.md)" for topic in TOPICS]
    lines += [
        "## What they share",
        f"Many take any of the server's {topics[0]}, all of them any of the {topics[1]}, and some"
        f" any of the {topics[2]} for staleness.",
        "## Your own",
        "[From scratch in 40 lines](../guide-own-algorithm.md).",
    ]
    if curves is not None:
        lines += ["## On the same task", curves.task_text(), _accuracies(curves, list(kinds))]
    return _joined(lines)


# ---------------------------------------------------------------- parts of a page


def _generated(module: str) -> str:
    path = f"{module.replace('.', '/')}"
    source = inspect.getsourcefile(importlib.import_module(module)) or path
    name = f"{path}/__init__.py" if Path(source).name == "__init__.py" else f"{path}.py"
    return f"<!-- Made from [{name}]({_REPOSITORY}/{name}) by `make docs`: edit that instead. -->"


def _group(group: SettingGroup) -> str:
    rows = [
        (f"`{s.name}`", _default(s.default), s.type, _inline(s.meaning)) for s in group.settings
    ]
    table = _table(("setting", "default", "type", "meaning"), rows)
    return table if group.title == OWN else f"### {group.title}\n\n{table}"


def _default(value: object) -> str:
    return f"`{value}`"


def _imported(kind: type[Algorithm], block: DocBlock) -> DocBlock:
    """Return an example with the import that it needs to run where a reader pastes it."""
    line = f">>> from {kind.__module__} import {kind.__name__}"
    return DocBlock(block.kind, f"{line}\n{block.text}") if block.kind == "example" else block


def _neighbours(name: str, kind: type[Algorithm], curves: Curves | None) -> Iterator[str]:
    kinds = built_in()
    others = [other for other in neighbours(kind) if other in kinds]
    if not others:
        return
    yield "## Neighbours"
    if curves is not None and curves.of(name):
        shown = [name, *others]
        yield f"![Test accuracy of {', '.join(shown)}](img/{name}.png)"
        yield curves.task_text()
        yield _accuracies(curves, shown)
    yield "\n".join(f"- [`{o}`]({o}.md): {_inline(summary(kinds[o]))}" for o in others)


def _accuracies(curves: Curves, names: Sequence[str]) -> str:
    """Return how the runs ended."""
    rows = []
    for found in sorted(
        (curve for name in names if (curve := curves.of(name))), key=lambda c: -c.mean
    ):
        settings = ", ".join(f"{key}={value}" for key, value in found.settings.items())
        spread = f"{found.least:.2%} to {found.most:.2%}" if found.seeds > 1 else ""
        link = f"[`{found.policy}`]({found.policy}.md)"
        rows.append((link, f"`{settings}`" if settings else "", f"{found.mean:.2%}", spread))
    return _table(("", "settings", "test accuracy", "over the seeds"), rows)


def _users(topic: str) -> Iterator[str]:
    setting = {"optimizers": "optimizer", "schedules": "schedule", "modulations": "modulate"}
    for name, kind in built_in().items():
        if setting[topic] in described(kind):
            yield name


# ---------------------------------------------------------------- Markdown


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"


def _inline(text: str) -> str:
    return policy_docstring.marked(text, _link)


def _link(reference: str) -> str | None:
    target = policy_catalog.references().get(reference)
    if target is None:
        return None
    return f"[{target if target in TOPICS else f'``{target}``'}]({target}.md)"


def _blocks(blocks: Iterable[DocBlock]) -> list[str]:
    return [_block(block) for block in blocks]


def _block(block: DocBlock) -> str:
    if block.kind == "table":
        head, *rows = ([_inline(cell) for cell in row] for row in block.rows)
        return _table(head, rows)
    if block.kind == "text":
        return _inline(block.text)
    language = {"example": "pycon", "math": "text", "code": "text"}[block.kind]
    return f"```{language}\n{block.text}\n```"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", text)
