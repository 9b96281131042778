"""The results as figures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aiops.lab import figure_style
from aiops.lab.figure_style import BLUE, GREEN, GREY, ORANGE, title
from benchmarks.algorithms import accuracy, idle, straggler
from benchmarks.algorithms.tables import grouped

_COLUMNS = 6


def save(content: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draw what there are results of: ``<stem>-accuracy.png``, ``-idle.png``, ``-straggler.png``.

    Returns
    -------
    The files written.

    Raises
    ------
    UsageError
        When matplotlib is missing.
    """
    parts = (
        ("accuracy", [row for row in content["runs"] if not row["variant"]], draw_accuracy),
        ("idle", content["idle"], draw_idle),
        ("straggler", content["straggler"], draw_straggler),
    )
    written = []
    for name, rows, draw in parts:
        if rows:
            with figure_style.figure() as figure:
                draw(rows, content["task"], figure)
                written.append(figure_style.save(figure, stem.with_name(f"{stem.name}-{name}.png")))
    return written


def draw_accuracy(rows: Sequence[Any], task: Mapping[str, Any], figure: Any) -> None:
    """Draw each policy's test error by samples, before the others in grey."""
    found = grouped(rows)
    lines = math.ceil(len(found) / _COLUMNS)
    figure.set_size_inches(13, 2.3 * lines + 0.5)
    seeds = max(len(runs) for runs in found.values())
    title(
        figure,
        f"Test error on {task['dataset'].upper()}, {task['workers']} workers: each policy with its"
        f" defaults, {seeds} seed{'s' * (seeds > 1)} (grey: the others)",
    )
    panels = figure.subplots(lines, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    epoch = max(row["curve"][-1][0] for row in rows) / task["epochs"]
    everyone = [run for runs in found.values() for run in runs[:1]]
    for axes, (name, runs) in zip(panels.flat, found.items(), strict=False):
        for run in everyone:
            _error(axes, run, epoch, color=GREY, linewidth=0.5, alpha=0.6)
        for run in runs:
            _error(axes, run, epoch, color=BLUE, linewidth=1.2)
        axes.axhline(100 * (1 - accuracy.GOAL), color=ORANGE, linewidth=0.8, linestyle="--")
        reached = statistics.fmean(run["accuracy"] for run in runs)
        axes.set_title(name)
        axes.text(*(0.97, 0.93, f"{reached:.2%}"), transform=axes.transAxes, ha="right", va="top")
        axes.set_yscale("log")
        axes.set_ylim(1.4, 12)
        axes.set_xlim(0, 1.02 * task["epochs"])
        axes.set_yticks([2, 4, 8], ["2 %", "4 %", "8 %"])
        axes.minorticks_off()
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    for axes in list(panels.flat[: len(found)])[-_COLUMNS:]:
        axes.set_xlabel("epochs of samples")
        axes.tick_params(labelbottom=True)


def _error(axes: Any, run: Mapping[str, Any], epoch: float, **style: Any) -> None:
    points = [(samples / epoch, 100 * (1 - reached)) for samples, reached, _loss in run["curve"]]
    axes.plot(*zip(*points, strict=True), **style)


def draw_idle(rows: Sequence[Any], task: Mapping[str, Any], figure: Any) -> None:
    """Draw idle time by tau_max."""
    figure.set_size_inches(7, 4)
    title(figure, f"Idle workers, where a merge takes as long as {idle.MERGE} gradients")
    axes = figure.subplots()
    for variant, colour, marker, label, offset in (
        (1, BLUE, "o", "no-delay", (4, 5)),
        (2, GREEN, "s", "no-delay, cycles (variant 2)", (-4, -11)),
    ):
        points = [
            (row["settings"]["tau_max"], 100 * row["idle"])
            for row in rows
            if row["policy"] == "no-delay" and row["settings"].get("variant", 1) == variant
        ]
        if points:
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, label=label)
            for tau, share in points:
                axes.annotate(
                    f"{share:.1f}",
                    (tau, share),
                    xytext=offset,
                    textcoords="offset points",
                    ha="left" if variant == 1 else "right",
                    color=colour,
                    fontsize=8,
                )
    for row in rows:
        if row["policy"] == "hardsync":
            share = 100 * row["idle"]
            axes.axhline(share, color=ORANGE, linestyle="--", label=f"hardsync {share:.1f}")
    axes.axhline(100 * idle.GOAL, color=GREY, linestyle=":", label=f"goal {100 * idle.GOAL:g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(bottom=-5)
    axes.set_xlabel("τ_max, steps that a worker may be ahead")
    axes.set_ylabel("idle, per cent of the workers' time")
    axes.legend()


def draw_straggler(rows: Sequence[Any], task: Mapping[str, Any], figure: Any) -> None:
    """Draw what the healthy workers keep."""
    ordered = sorted(rows, key=lambda row: row["kept"])
    figure.set_size_inches(7, 0.3 * len(ordered) + 1.3)
    title(figure, f"Throughput of the others beside a worker {straggler.SLOWER} times slower")
    axes = figure.subplots()
    kept = [100 * row["kept"] for row in ordered]
    colours = [BLUE if row["policy"] in straggler.GOAL_FOR else GREY for row in ordered]
    bars = axes.barh([row["policy"] for row in ordered], kept, color=colours, height=0.7)
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.axvline(100 * straggler.GOAL, color=ORANGE, linewidth=1.0, linestyle="--")
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 112)
    axes.set_xlabel("per cent of their steps per second when all are healthy")
