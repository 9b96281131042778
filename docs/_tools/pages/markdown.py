"""docs/algorithms: a page per algorithm and topic, and the index."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from aiops.algorithms.base import Algorithm
from aiops.cli import policy_catalog
from aiops.cli.policy_catalog import TOPICS, built_in, described, facts, families, neighbours
from aiops.cli.policy_docstring import summary
from aiops.cli.policy_page import PageWriter, joined, table
from docs._tools.pages.curves import Curves

_REPOSITORY = "../.."  # of the pages' folder


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
    parts = _WRITER.algorithm(name, kind, _generated(kind.__module__))
    return joined([*parts, *_neighbours(name, kind, curves)])


def topic_page(topic: str) -> str:
    """Return the page of what several algorithms share."""
    users = [f"[`{name}`]({name}.md)" for name in sorted(_users(topic))]
    parts = _WRITER.topic(topic, _generated(TOPICS[topic]))
    return joined([*parts, "## Algorithms that have them", ", ".join(users) + "."])


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
            first = _WRITER.inline(summary(kinds[name]))
            rows.append((link, first, known.waits_for, known.worker, known.memory))
        lines += [f"## {family.capitalize()}", policy_catalog.FAMILIES.get(family, "")]
        lines.append(table(head, rows))
    topics = [f"[{topic}]({topic}.md)" for topic in TOPICS]
    lines += [
        "## What they share",
        f"Many take any of the server's {topics[0]}, all of them any of the {topics[1]}, and some"
        f" any of the {topics[2]} for staleness. Some settings may differ between tensors:"
        f" {topics[3]}.",
        "## Your own",
        "[From scratch in 40 lines](../guide-own-algorithm.md).",
    ]
    if curves is not None:
        lines += ["## On the same task", curves.task_text(), _accuracies(curves, list(kinds))]
        lines += _on_a_transformer(curves.transformer)
    return joined(lines)


def _on_a_transformer(rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    """Yield what every policy comes to on a transformer, if that was measured."""
    if not rows:
        return
    yield "## On a transformer"
    yield (
        "A byte-level transformer of 170,000 parameters, 8 workers of which one is three times"
        " slower, 600 mini-batches in all, in virtual time; AdamW where the policy admits it, and"
        " of three rates the best. Cost on held-out text in nats per byte"
        " ([`everything`](../results/experiments/README.md#everything))."
    )
    shown = []
    for row in sorted(rows, key=lambda row: float(row["nats"])):
        name, _space, settings = row["policy"].partition(" ")
        cells = (row["nats"], row["seconds in all"], row["mean τ"])
        shown.append((f"[`{name}`]({name}.md)", f"`{settings}`", *cells))
    yield table(("", "settings", "nats", "seconds in all", "mean τ"), shown)


# ---------------------------------------------------------------- parts of a page


def _generated(module: str) -> str:
    path = f"{module.replace('.', '/')}"
    source = inspect.getsourcefile(importlib.import_module(module)) or path
    name = f"{path}/__init__.py" if Path(source).name == "__init__.py" else f"{path}.py"
    return f"<!-- Made from [{name}]({_REPOSITORY}/{name}) by `make docs`: edit that instead. -->"


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
    yield "\n".join(f"- [`{o}`]({o}.md): {_WRITER.inline(summary(kinds[o]))}" for o in others)


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
    return table(("", "settings", "test accuracy", "over the seeds"), rows)


def _users(topic: str) -> Iterator[str]:
    setting = {"optimizers": "optimizer", "schedules": "schedule", "modulations": "modulate"}
    for name, kind in built_in().items():
        if kind().patterned if topic == "per-tensor" else setting[topic] in described(kind):
            yield name


def _link(reference: str) -> str | None:
    target = policy_catalog.references().get(reference)
    if target is None:
        return None
    return f"[{target if target in TOPICS else f'``{target}``'}]({target}.md)"


_WRITER = PageWriter(_link)
