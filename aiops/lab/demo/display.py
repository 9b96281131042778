"""The displays of a demo: a live table on a terminal, plain lines elsewhere, and a summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.constrain import Constrain
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aiops.common import formatting, ledger_sums
from aiops.lab.demo.record import DemoRecord, DemoSample, DemoWorker

_LINE_EVERY = 1.0  # seconds between two plain lines
_TENSORS = 8  # that the summary lists
_WIDTH = 96  # of the live table; wider ones are hard to read


class LiveDisplay:
    """A table that is redrawn in place; use it as a context manager."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def show(self, record: DemoRecord) -> None:
        """Redraw it."""
        self._live.update(_screen(record), refresh=True)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._live.__exit__(*error)


class LineDisplay:
    """One line whenever the phase changes, and one per second of training."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._phase = ""
        self._due = 0.0

    def show(self, record: DemoRecord) -> None:
        """Print a line if the phase has changed, or a second has passed."""
        if record.phase != self._phase:
            self._phase = record.phase
            self._print(f"{record.phase} {record.url}".rstrip())
        last = record.last
        if last is not None and record.phase == "training" and last.seconds >= self._due:
            self._due = last.seconds + _LINE_EVERY
            self._print(_line(record, last))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def __enter__(self) -> LineDisplay:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def display_for(console: Console) -> LiveDisplay | LineDisplay:
    """Return the display that suits where the output goes."""
    live = console.is_terminal and not console.is_dumb_terminal
    return LiveDisplay(console) if live else LineDisplay(console)


def print_summary(
    console: Console, record: DemoRecord, *, complete: bool, plot: str | None
) -> None:
    """Print what a demo came to, also one that was cut short."""
    rows = [(label, value) for label, value in _summary(record, plot) if value]
    title = f"{_what(record)}: {'done' if complete else 'stopped early'}"
    if console.is_terminal:
        grid = Table.grid(padding=(0, 3))
        for label, value in rows:
            grid.add_row(Text(label, style="dim"), Text(value, style="bold"))
        style = "green" if complete else "yellow"
        console.print(Panel(grid, title=title, border_style=style, expand=False, padding=(1, 2)))
        return
    console.print(title, highlight=False, markup=False, soft_wrap=True)
    for label, value in rows:
        console.print(f"  {label:<15}{value}", highlight=False, markup=False, soft_wrap=True)


def _what(record: DemoRecord) -> str:
    settings = record.settings
    return f"{settings.policy} on {settings.dataset}, {settings.workers} workers"


def _summary(record: DemoRecord, plot: str | None) -> Iterator[tuple[str, str]]:
    last = record.last
    if last is None:
        yield "reached", record.phase
        return
    steps, settings = record.steps, record.settings
    yield "test accuracy", formatting.percent(last.accuracy)
    yield "test loss", f"{last.loss:.4f}"
    yield "training", f"{formatting.seconds(record.seconds)}, {steps:,} mini-batches"
    rate = last.updates / record.seconds if record.seconds else 0.0
    yield "updates", f"{last.updates:,} ({rate:,.0f} per second)"
    yield "mean staleness", f"{last.mean_staleness:.2f} updates"
    yield "pushed", formatting.nbytes(last.bytes_pushed)
    yield "fetched", formatting.nbytes(last.bytes_fetched)
    saved = ledger_sums.saved(record.ledger) if record.ledger else 0
    yield "saved", formatting.nbytes(saved) if saved else ""
    for name, *counts in record.tensors()[:_TENSORS]:
        pushed, fetched, spared = map(formatting.nbytes, counts)
        yield (
            name,
            f"{pushed} pushed, {fetched} fetched" + (f", {spared} saved" if counts[2] else ""),
        )
    wasted = record.report.get("wasted", 0)
    yield "wasted", f"{wasted:,} gradients" if wasted else ""
    lr = record.report.get("settings", {}).get("lr", settings.lr)
    batch, seed = settings.batch_size, settings.seed
    yield "settings", f"learning rate {lr:g}, batch size {batch}, seed {seed}"
    yield "plot", plot or ""
    yield "compare", 'make demo ARGS="--policy hardsync", or aiops demo --policy hardsync'
    yield "next", "aiops policies lists all policies; README.md, Train: your own loop"


def _line(record: DemoRecord, last: DemoSample) -> str:
    return (
        f"{last.seconds:5.1f} s  {record.steps:>8,}/{record.settings.steps:,} steps"
        f"  version {last.updates:,}  loss {last.loss:.4f}"
        f"  accuracy {formatting.percent(last.accuracy)}  staleness {last.mean_staleness:.2f}"
        f"  {last.rate:,.0f} updates/s  pushed {formatting.nbytes(last.bytes_pushed)}"
        f"  fetched {formatting.nbytes(last.bytes_fetched)}"
    )


# ---------------------------------------------------------------- the live table


def _screen(record: DemoRecord) -> RenderableType:
    body = Group(_progress(record), "", _measures(record), "", _workers(record))
    title = f"[bold]aiops demo[/bold] · {_what(record)}"
    return Constrain(Panel(body, title=title, subtitle=record.url or None, padding=1), _WIDTH)


def _progress(record: DemoRecord) -> RenderableType:
    done, total = record.steps, record.settings.steps
    row = Table.grid(padding=(0, 2), expand=True)
    row.add_column(min_width=8, no_wrap=True)
    row.add_column(ratio=1)
    row.add_column(justify="right", no_wrap=True)
    left = record.seconds * (total - done) / done if done else 0.0
    when = f"{formatting.seconds(record.seconds)}, {formatting.seconds(left)} left" if left else ""
    row.add_row(
        Text(record.phase, style="bold cyan"),
        ProgressBar(total=total, completed=done),
        f"{done:,}/{total:,} mini-batches  {when}",
    )
    return row


def _measures(record: DemoRecord) -> RenderableType:
    last, samples = record.last, record.samples
    grid = Table.grid(padding=(0, 2), expand=True)
    for _ in range(2):
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(style="bold", no_wrap=True, min_width=8, justify="right")
        grid.add_column(ratio=1, no_wrap=True)
    if last is None:
        return grid
    curve = formatting.sparkline([sample.accuracy for sample in samples], 24)
    falling = formatting.sparkline([sample.loss for sample in samples], 24)
    vbar = record.report.get("vbar")
    grid.add_row(
        *("test accuracy", formatting.percent(last.accuracy), Text(curve, style="green")),
        *("version", f"{last.updates:,}", ""),
    )
    grid.add_row(
        *("test loss", f"{last.loss:.4f}", Text(falling, style="magenta")),
        *("updates/s", f"{last.rate:,.0f}", ""),
    )
    grid.add_row(
        *("mean staleness", f"{last.mean_staleness:.2f}", "" if vbar is None else f"v̄ {vbar:.4g}"),
        *("bytes", formatting.nbytes(last.bytes_pushed + last.bytes_fetched), ""),
    )
    return grid


def _workers(record: DemoRecord) -> RenderableType:
    table = Table(box=None, expand=True, header_style="dim", padding=(0, 1, 0, 0))
    table.add_column("worker", no_wrap=True)
    table.add_column("state", no_wrap=True)
    for name in ("steps", "loss", "stale", "pushed", "fetched", "waits", "refused"):
        table.add_column(name, justify="right", no_wrap=True)
    for worker in record.workers:
        table.add_row(*_row(worker))
    return table


def _row(worker: DemoWorker) -> tuple[str, ...]:
    progress, report = worker.progress, worker.report
    return (
        worker.name,
        worker.state,
        f"{worker.steps:,}/{worker.share:,}",
        f"{progress.loss:.4f}" if progress else "–",
        f"{report['staleness']:,}" if report else "–",
        formatting.nbytes(report["bytes_pushed"]) if report else "–",
        formatting.nbytes(report["bytes_fetched"]) if report else "–",
        formatting.percent(progress.idle) if progress else "–",
        f"{report['refused']:,}" if report else "–",
    )
