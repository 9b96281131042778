"""A demo as a figure: learning curves, staleness and traffic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from aiops.common import formatting
from aiops.errors import UsageError
from aiops.lab.demo.record import Record

_INK, _GRID = "#2b2b2b", "#d9d9d9"
_BLUE, _ORANGE, _GREEN = "#0072b2", "#d55e00", "#009e73"  # Okabe and Ito: safe for the colour-blind
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": _INK,
    "axes.edgecolor": "#8c8c8c",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.0,
    "legend.frameon": False,
    "svg.hashsalt": "aiops",
}


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


def save(record: Record, path: Path) -> None:
    """Draw a record of at least one sample, and write it to a .png, .svg or .pdf file.

    Raises
    ------
    UsageError
        When matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("plots need matplotlib: pip install 'aiops-ps[demo]'") from None
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        draw(record, figure)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, dpi=200)
        except OSError as error:
            raise UsageError(f"cannot write the plot to {path}: {error.strerror}") from None


def draw(record: Record, figure: Any) -> None:
    """Draw into a matplotlib figure."""
    settings, last = record.settings, record.samples[-1]
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
    figure.suptitle(
        f"{settings.policy} on {settings.dataset}: {settings.workers} workers,"
        f" {last.updates:,} updates in {formatting.seconds(record.seconds)}",
        x=0.012,
        ha="left",
        fontsize=12,
        fontweight="bold",
        color=_INK,
    )
    (loss, accuracy), (staleness, traffic) = figure.subplots(2, 2)
    _draw_loss(record, loss)
    _draw_accuracy(record, accuracy)
    _draw_staleness(record, staleness)
    _draw_traffic(record, traffic)
    for axes in (loss, accuracy, traffic):
        axes.set_xlabel("updates")
        axes.set_xlim(0, 1.02 * max(last.updates, 1))
        axes.xaxis.set_major_formatter(_thousands)


def _thousands(value: float, _position: Any = None) -> str:
    return f"{value:,.0f}"


def _plain_at_1_2_5(value: float, _position: Any = None) -> str:
    """Label a logarithmic axis sparsely, with plain numbers."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def _draw_loss(record: Record, axes: Any) -> None:
    points = [(s.updates, s.loss) for s in record.samples if math.isfinite(s.loss) and s.loss > 0]
    axes.plot(*zip(*points, strict=True), color=_BLUE, marker="o")
    axes.set_yscale("log")
    for formatter in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatter(_plain_at_1_2_5)
    axes.set_title("Test loss")
    axes.set_ylabel("negative log-likelihood (nats)")


def _draw_accuracy(record: Record, axes: Any) -> None:
    samples = record.samples
    axes.plot(
        [sample.updates for sample in samples],
        [100 * sample.accuracy for sample in samples],
        color=_GREEN,
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
        color=_GREEN,
    )


def _floor(record: Record) -> float:
    """Return where the accuracy's axis begins: below all but the first rise."""
    early = record.samples[-1].updates * 0.02
    later = [sample.accuracy for sample in record.samples if sample.updates > early] or [0.0]
    return max(0.0, 10 * math.floor(10 * min(later) - 0.2))


def _draw_staleness(record: Record, axes: Any) -> None:
    counts = record.staleness()
    total = sum(counts.values()) or 1
    shown = _without_tail(counts, total)
    shares = [100 * counts.get(tau, 0) / total for tau in shown]
    axes.bar(shown, shares, color=_ORANGE, width=0.8)
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
        color=_INK,
    )


def _without_tail(counts: dict[int, int], total: int) -> list[int]:
    """Return the stalenesses to show: all but the last half per cent, which no bar can show."""
    top, seen = 0, 0
    for tau in sorted(counts):
        top, seen = tau, seen + counts[tau]
        if seen >= 0.995 * total:
            break
    return list(range(top + 1))


def _draw_traffic(record: Record, axes: Any) -> None:
    samples = record.samples
    updates = [sample.updates for sample in samples]
    pushed = [sample.bytes_pushed for sample in samples]
    fetched = [sample.bytes_fetched for sample in samples]
    for counts, label, colour, line in (
        (pushed, "pushed", _BLUE, "-"),
        (fetched, "fetched", _ORANGE, "--"),
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
