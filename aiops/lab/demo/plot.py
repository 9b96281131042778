"""A demo as a figure: learning curves, staleness and traffic."""

from __future__ import annotations

import math
from pathlib import Path

from aiops.common import formatting
from aiops.errors import UsageError
from aiops.lab import drawing
from aiops.lab.demo.record import DemoRecord
from aiops.lab.figures import Figure, Panel, Series


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
    drawing.save(figure(record), path.with_suffix(""), (path.suffix,))


def figure(record: DemoRecord) -> Figure:
    """Return the figure of a record of at least one sample."""
    samples, settings = record.samples, record.settings
    last, updates = samples[-1], [sample.updates for sample in samples]
    losses = [s.loss if math.isfinite(s.loss) and s.loss > 0 else math.nan for s in samples]
    accuracy = f"test accuracy, {formatting.percent(last.accuracy)} in the end"
    traffic = [
        Series(f"{way} {formatting.nbytes(nbytes[-1])}", updates, [[n / 1e6 for n in nbytes]])
        for way, nbytes in (
            ("pushed", [sample.bytes_pushed for sample in samples]),
            ("both ways", [sample.bytes_pushed + sample.bytes_fetched for sample in samples]),
        )
    ]
    panels = [
        Panel("Test loss", "updates", "nats", [Series("test loss", updates, [losses])], log="y"),
        Panel(
            *("Test accuracy", "updates", "%"),
            [Series(accuracy, updates, [[100 * sample.accuracy for sample in samples]])],
            bottom=_floor(record),
            top=100.5,
        ),
        Panel("Staleness", "updates since its parameters", "% of gradients", [_staleness(record)]),
        Panel("Bytes on the wire, all workers", "updates", "MB", traffic, bottom=0),
    ]
    took = formatting.seconds(record.seconds)
    title = f"{settings.policy} on {settings.dataset}: {settings.workers} workers,"
    return Figure(f"{title} {last.updates:,} updates in {took}", panels, columns=2)


def _floor(record: DemoRecord) -> float:
    """Return where the accuracy's axis begins: below all but the first rise."""
    early = record.samples[-1].updates * 0.02
    later = [sample.accuracy for sample in record.samples if sample.updates > early] or [0.0]
    return max(0.0, 10 * math.floor(10 * min(later) - 0.2))


def _staleness(record: DemoRecord) -> Series:
    """Return the share of each staleness, but for the last half per cent, which no bar can show."""
    counts = record.staleness()
    total, seen, shown = sum(counts.values()) or 1, 0, 0
    for tau in sorted(counts):
        if seen >= 0.995 * total:
            break
        shown, seen = tau, seen + counts[tau]
    taus = range(shown + 1)
    label = (
        f"staleness, mean {record.samples[-1].mean_staleness:.2f}, largest {max(counts, default=0)}"
    )
    return Series(label, taus, [[100 * counts.get(tau, 0) / total for tau in taus]], kind="bars")
