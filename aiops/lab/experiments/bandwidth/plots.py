"""The figures: what a byte buys, how fast bytes flow, and which tensors they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from aiops.lab import figure_style
from aiops.lab.experiments.bandwidth.results import Row, total
from aiops.lab.figure_style import GREY, PALE, colour, dashes, marker

_SHOWN = 12  # tensors of one run that can be told apart


def front(rows: Sequence[Row]) -> list[Row]:
    """Return the runs that no other beats in both bytes and error, fewest bytes first."""
    found: list[Row] = []
    for row in sorted(rows, key=lambda row: (total(row), row["error"])):
        if not found or row["error"] < found[-1]["error"]:
            found.append(row)
    return found


def groups(rows: Sequence[Row]) -> list[list[Row]]:
    """Return the runs that differ in nothing but their seeds, together, in order."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        same = {key: value for key, value in row["case"].items() if key != "seed"}
        found.setdefault(json.dumps(same, sort_keys=True), []).append(row)
    return list(found.values())


def save(rows: Sequence[Row], stem: Path) -> list[Path]:
    """Draw the runs; return the files: ``STEM-pareto.png``, ``-time.png`` and ``-tensors.png``.

    Raises
    ------
    UsageError
        When matplotlib is missing, or a file cannot be written.
    """
    files, cases = [], groups(rows)
    for name, draw in (("pareto", _pareto), ("time", _time), ("tensors", _tensors)):
        with figure_style.figure((8.0, 4.4 + 0.2 * len(cases))) as figure:
            draw(cases, figure.subplots())
            figure.legend(loc="outside lower left", fontsize=7, ncols=1)
            files.append(figure_style.save(figure, stem.with_name(f"{stem.name}-{name}.png")))
    return files


def _pareto(cases: Sequence[Sequence[Row]], axes: Any) -> None:
    """Draw test error against bytes, from the least to the most of all seeds; and the front."""
    means = [
        {
            "pushed": mean(row["pushed"] for row in case),
            "fetched": mean(row["fetched"] for row in case),
            "error": mean(row["error"] for row in case),
        }
        for case in cases
    ]
    best = front(means)
    axes.plot(
        [total(r) / 1e6 for r in best], [100 * r["error"] for r in best], color=GREY, zorder=1
    )
    for number, (case, point) in enumerate(zip(cases, means, strict=True)):
        errors = [100 * row["error"] for row in case]
        middle = 100 * point["error"]
        axes.errorbar(
            total(point) / 1e6,
            middle,
            yerr=[[middle - min(errors)], [max(errors) - middle]],
            color=colour(number),
            marker=marker(number),
            linestyle="none",
            capsize=2,
            label=_label(case),
            zorder=2,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    for axis in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        axis("{x:g}")
    axes.set_xlabel("bytes, both ways (MB)")
    axes.set_ylabel("test error (%)")
    axes.set_title("What a byte buys")


def _time(cases: Sequence[Sequence[Row]], axes: Any) -> None:
    """Draw bytes against time, of each case's first seed."""
    for number, case in enumerate(cases):
        curve = case[0]["curve"]
        crossed = [(s["pushed"] + s["fetched"]) / 1e6 for s in curve]
        seconds = [s["seconds"] for s in curve]
        axes.plot(seconds, crossed, dashes(number), color=colour(number), label=_label(case))
    axes.set_yscale("symlog")
    axes.set_xlabel("seconds")
    axes.set_ylabel("bytes, both ways (MB)")
    axes.set_title("Bytes against time")


def _tensors(cases: Sequence[Sequence[Row]], axes: Any) -> None:
    """Draw by tensor, as stacked bars, what share of its bytes each case's first seed moved."""
    names: dict[str, int] = {}
    for case in cases:
        for name in case[0]["ledger"]["tensors"]["names"][:_SHOWN]:
            names.setdefault(name, len(names))
    for place, case in enumerate(cases):
        tensors, left = case[0]["ledger"]["tensors"], 0.0
        moved = _payload(case)
        for name, nbytes in zip(tensors["names"], moved, strict=True):
            width = 100 * nbytes / max(sum(moved), 1)
            shade = colour(names[name]) if name in names else PALE
            axes.barh(place, width, left=left, color=shade)
            left += width
    labels = [f"{_label(case)}: {sum(_payload(case)) / 1e6:,.0f} MB" for case in cases]
    axes.set_yticks(range(len(cases)), labels, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("share of the payload, both ways (%)")
    axes.set_title("Which tensors travelled")
    for name, number in names.items():
        axes.barh(0, 0, color=colour(number), label=name)


def _payload(case: Sequence[Row]) -> list[int]:
    tensors = case[0]["ledger"]["tensors"]
    return [u + d for u, d in zip(tensors["pushed"], tensors["fetched"], strict=True)]


def _label(case: Sequence[Row]) -> str:
    return str(case[0]["name"])
