"""The figures: what a byte buys, how fast bytes flow, and which tensors they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from aiops.demo.plot import STYLE
from aiops.errors import UsageError
from aiops.experiments.bandwidth.results import Row, total

_SHOWN = 12  # tensors of one run that can be told apart
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c8c8c")


_MARKERS = "os^D"


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the runs that no other beats in both bytes and error, fewest bytes first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (total(row), row["error"])):
        if not found or row["error"] < found[-1]["error"]:
            found.append(row)
    return found


def save(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw the runs; return the files: ``STEM-pareto.png``, ``-time.png`` and ``-tensors.png``.

    Raises
    ------
    UsageError
        When matplotlib is missing, or a file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need the matplotlib package: pip install matplotlib") from None
    files = []
    with matplotlib.rc_context(STYLE):
        for name, draw in (("pareto", _pareto), ("time", _time), ("tensors", _tensors)):
            figure = Figure(figsize=(8.0, 4.8), layout="constrained")
            draw(rows, figure.subplots())
            path = stem.with_name(f"{stem.name}-{name}.png")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                figure.savefig(path, dpi=150)
            except OSError as error:
                raise UsageError(f"{path} cannot be written: {error.strerror}") from None
            files.append(path)
    return files


def _pareto(rows: Sequence[Row], axes: Any) -> None:
    """Draw test error against bytes; the front is what nobody beats."""
    best = front(rows)
    axes.plot([total(r) / 1e6 for r in best], [r["error"] for r in best], color="#8c8c8c", zorder=1)
    for number, row in enumerate(rows):
        point = total(row) / 1e6, row["error"]
        marker = _MARKERS[number // len(_COLOURS) % len(_MARKERS)]
        axes.scatter(*point, color=_colour(number), marker=marker, label=row["name"], zorder=2)
    axes.set_xscale("log")
    for axis in (axes.xaxis.set_major_formatter, axes.xaxis.set_minor_formatter):
        axis("{x:g}")
    axes.set_xlabel("bytes, both ways (MB)")
    axes.set_ylabel("test error")
    axes.set_title("What a byte buys")
    axes.legend(fontsize=7)


def _time(rows: Sequence[Row], axes: Any) -> None:
    """Draw bytes against time."""
    for number, row in enumerate(rows):
        curve = row["curve"]
        crossed = [(s["pushed"] + s["fetched"]) / 1e6 for s in curve]
        seconds = [s["seconds"] for s in curve]
        line = ("-", "--", ":")[number // len(_COLOURS) % 3]
        axes.plot(seconds, crossed, line, color=_colour(number), label=row["name"])
    axes.set_yscale("symlog")
    axes.set_xlabel("seconds")
    axes.set_ylabel("bytes, both ways (MB)")
    axes.set_title("Bytes against time")
    axes.legend(fontsize=7)


def _tensors(rows: Sequence[Row], axes: Any) -> None:
    """Draw each run's bytes by tensor, as stacked bars."""
    names: dict[str, int] = {}
    for row in rows:
        for name in row["ledger"]["tensors"]["names"][:_SHOWN]:
            names.setdefault(name, len(names))
    for place, row in enumerate(rows):
        tensors, left = row["ledger"]["tensors"], 0.0
        for name, up, down in zip(
            tensors["names"], tensors["pushed"], tensors["fetched"], strict=True
        ):
            width = (up + down) / 1e6
            colour = _colour(names[name]) if name in names else "#d9d9d9"
            axes.barh(place, width, left=left, color=colour)
            left += width
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("payload, both ways (MB)")
    axes.set_title("Which tensors travelled")
    for name, number in names.items():
        axes.barh(0, 0, color=_colour(number), label=name)
    axes.legend(fontsize=7)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]
