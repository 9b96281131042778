"""Write the table of all metrics between the marks of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from aiops.metrics import traffic, training, upkeep, workers
from aiops.metrics.catalog import INFO, INFO_HELP, INFO_LABELS
from aiops.metrics.metric import Metric

_MARKS = re.compile(r"(<!-- metrics: generated -->\n).*?(<!-- end of metrics -->)", re.DOTALL)

_GROUPS = (
    ("Training", training.METRICS),
    ("Traffic", traffic.METRICS),
    ("The server itself", upkeep.METRICS),
    ("Workers, one by one", workers.METRICS),
)


def table() -> str:
    """Return the tables of all metrics, a table for each group."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    labels = " ".join(f"`{label}`" for label in INFO_LABELS)
    for title, metrics in _GROUPS:
        yield from ("", f"### {title}", "", "| metric | kind | labels | |", "|---|---|---|---|")
        if metrics is training.METRICS:
            yield f"| `{INFO}` | gauge | {labels} | {INFO_HELP} |"
        yield from map(_row, metrics)
    yield ""


def _row(metric: Metric) -> str:
    labels = " ".join(f"`{label}`" for label in metric.labels)
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def page(text: str) -> str:
    """Return a page with its table as the code has it."""
    return _MARKS.sub(lambda found: found[1] + table() + found[2], text)


def update(path: Path) -> None:
    """Rewrite a page."""
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
