"""A demo as a figure: learning curves, staleness and traffic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from aiops.common import formatting
from aiops.errors import UsageError
from aiops.lab import figure_style
from aiops.lab.demo.record import DemoRecord
from aiops.lab.figure_style import BLUE, GREEN, INK, ORANGE, sparse, thousands


def place(out: Path) -> Path:
    """Return the file that ``--out`` means: itself if it has a suffix, else one in that folder.

    Raises
    ------
    UsageError
        When no plot can be written with that suffix.
    """
    if not out.suffix or out.is_dir():
        return out / "demo.png"
    if out.suffix not in (".png", ".svg", ".pdf"):
        raise UsageError(f"--out {out}: a plot is a .png, .svg or .pdf file, or give a folder")
    return out


def save(record: DemoRecord, path: Path) -> None:
    """Draw a record of at least one sample, and write it to a .png, .svg or .pdf file.

    Raises
    ------
    UsageError
        When matplotlib is missing, or the file cannot be written.
    """
    with figure_style.figure((9.6, 6.4)) as figure:
        draw(record, figure)
        figure_style.save(figure, path)


def draw(record: DemoRecord, figure: Any) -> None:
    """Draw into a matplotlib figure."""
    settings, last = record.settings, record.samples[-1]
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure_style.title(
        figure,
        f"{settings.policy} on {settings.dataset}: {settings.workers} workers,"
        f" {last.updates:,} updates in {formatting.seconds(record.seconds)}",
        size=12,
    )
    (loss, accuracy), (staleness, traffic) = figure.subplots(2, 2)
    _draw_loss(record, loss)
    _draw_accuracy(record, accuracy)
    _draw_staleness(record, staleness)
    _draw_traffic(record, traffic)
    for axes in (loss, accuracy, traffic):
        axes.set_xlabel("updates")
        axes.set_xlim(0, 1.02 * max(last.updates, 1))
        axes.xaxis.set_major_formatter(thousands)


def _draw_loss(record: DemoRecord, axes: Any) -> None:
    points = [(s.updates, s.loss) for s in record.samples if math.isfinite(s.loss) and s.loss > 0]
    axes.plot(*zip(*points, strict=True), color=BLUE, marker="o")
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(sparse)
    axes.set_title("Test loss")
    axes.set_ylabel("negative log-likelihood (nats)")


def _draw_accuracy(record: DemoRecord, axes: Any) -> None:
    samples = record.samples
    axes.plot(
        [sample.updates for sample in samples],
        [100 * sample.accuracy for sample in samples],
        color=GREEN,
        marker="o",
    )
    low = _floor(record)
    axes.set_ylim(low, 100 + 0.02 * (100 - low))
    axes.set_title("Test accuracy")
    axes.set_ylabel("per cent")
    axes.annotate(
        f"{formatting.percent(samples[-1].accuracy)}",
        (samples[-1].updates, 100 * samples[-1].accuracy),
        xytext=(0, -14),
        textcoords="offset points",
        ha="right",
        va="top",
        fontweight="bold",
        color=GREEN,
    )


def _floor(record: DemoRecord) -> float:
    """Return where the accuracy's axis begins: below all but the first rise."""
    early = record.samples[-1].updates * 0.02
    later = [sample.accuracy for sample in record.samples if sample.updates > early] or [0.0]
    return max(0.0, 10 * math.floor(10 * min(later) - 0.2))


def _draw_staleness(record: DemoRecord, axes: Any) -> None:
    counts = record.staleness()
    total = sum(counts.values()) or 1
    shown = _without_tail(counts, total)
    shares = [100 * counts.get(tau, 0) / total for tau in shown]
    axes.bar(shown, shares, color=ORANGE, width=0.8)
    axes.set_title("Staleness")
    axes.set_xlabel("updates since their parameters")
    axes.set_ylabel("per cent of the gradients")
    axes.grid(visible=False, axis="x")
    axes.xaxis.get_major_locator().set_params(integer=True)
    mean = record.samples[-1].mean_staleness
    axes.text(
        *(0.98, 0.95, f"mean {mean:.2f}\nlargest {max(counts, default=0)}"),
        transform=axes.transAxes,
        ha="right",
        va="top",
        color=INK,
    )


def _without_tail(counts: dict[int, int], total: int) -> list[int]:
    """Return the stalenesses to show: all but the last half per cent, which no bar can show."""
    top, seen = 0, 0
    for tau in sorted(counts):
        top, seen = tau, seen + counts[tau]
        if seen >= 0.995 * total:
            break
    return list(range(top + 1))


def _draw_traffic(record: DemoRecord, axes: Any) -> None:
    samples = record.samples
    updates = [sample.updates for sample in samples]
    pushed = [sample.bytes_pushed for sample in samples]
    fetched = [sample.bytes_fetched for sample in samples]
    for counts, label, colour, line in (
        (pushed, "pushed", BLUE, "-"),
        (fetched, "fetched", ORANGE, "--"),
    ):
        axes.plot(
            *(updates, counts, line),
            color=colour,
            label=f"{label} {formatting.nbytes(counts[-1])}",
        )
    axes.set_title("Bytes on the wire, all workers")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: formatting.nbytes(value).replace(".0 ", " "))
    axes.legend(loc="upper left")
