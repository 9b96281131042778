"""The display of ``aiops run``: a live table on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from aiops.cli.tables import table as empty_table
from aiops.common import formatting
from aiops.common.launchers import worker_name
from aiops.errors import UsageError
from aiops.launch.supervision import SERVER

_COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "red")
_EVERY = 10.0  # seconds between two lines where there is no live table
_ROWS = 24  # workers that fit a screen
_BAR = 60  # columns


class _Row:
    """The facts of one worker.

    Attributes
    ----------
    state
        A word.
    steps, rate
        Gradients that the server has had of it, and how many in a second, lately.
    idle
        The share of the time, lately, in which its program's main thread waited for something else
        than a processor: for the server, or for data. None: not known.
    entry
        Of the server's statistics: that of its newest connection.
    """

    def __init__(self) -> None:
        self.state = "waits"
        self.restarts = 0
        self.steps, self.rate = 0, 0.0
        self.idle: float | None = None
        self._busy: float | None = None
        self.entry: Mapping[str, Any] = {}

    def waited(self, busy: float | None, seconds: float) -> None:
        """Take the seconds that it has been busy in all; ``seconds``: since the last call."""
        if busy is None or self._busy is None or busy < self._busy or seconds <= 0:
            self.idle = None
        else:
            idle = min(1.0, max(0.0, 1 - (busy - self._busy) / seconds))
            before = idle if self.idle is None else self.idle
            self.idle = before + min(1.0, seconds / 3) * (idle - before)
        self._busy = busy

    def update(self, entries: list[Mapping[str, Any]], seconds: float) -> None:
        """Take the entries of its connections, first to last."""
        steps = sum(entry["pushes"] for entry in entries)
        if seconds > 0:
            share = min(1.0, seconds / 3)
            self.rate += share * ((steps - self.steps) / seconds - self.rate)
        self.steps = max(steps, self.steps)
        self.entry = entries[-1]
        if self.state in ("waits", "starts", "gone") and self.entry["present"]:
            self.state = "trains"
        elif self.state == "trains" and not self.entry["present"]:
            self.state = "gone"


class _LogFiles:
    """The files of ``--logs``: one for each process."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--logs {folder}: {error.strerror}", output=str(folder)) from None
        self._folder, self._open = folder, dict[int, IO[str]]()

    def write(self, rank: int, text: str) -> None:
        """Append a line."""
        if rank not in self._open:
            name = "server.txt" if rank == SERVER else f"worker-{rank}.txt"
            path = self._folder / name
            self._open[rank] = path.open("a", encoding="utf-8", buffering=1)
        self._open[rank].write(text + "\n")

    def close(self) -> None:
        """Close them all."""
        for file in self._open.values():
            file.close()


class Screen:
    """A `aiops.launch.job.Watcher` for people.

    Parameters
    ----------
    workers, steps, logs
        The command's.
    console
        Standard error.
    live
        Show a live table, if that is a terminal.
    """

    def __init__(
        self,
        workers: int,
        steps: int | None,
        logs: Path | None,
        console: Console,
        *,
        live: bool = True,
    ) -> None:
        self._rows = [_Row() for _ in range(workers)]
        self._server, self._steps, self._console = "starts", steps, console
        self._files = _LogFiles(logs) if logs else None
        self._report: Mapping[str, Any] | None = None
        self._began = self._looked = self._shown = time.monotonic()
        self._live: Live | None = None
        if live and console.is_terminal and not console.is_dumb_terminal:
            self._live = Live(
                console=console, auto_refresh=False, transient=True, redirect_stderr=False
            )

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._live is not None:
            self._live.__exit__(*error)
        if self._files is not None:
            self._files.close()
        if self._report is not None and not error[0]:
            self._print(self._line())

    def line(self, rank: int, text: str, *, error: bool) -> None:
        """Show a line, or write it to its file."""
        text = text.rsplit("\r", 1)[-1] if "\r" in text.rstrip("\r") else text.rstrip("\r")
        if self._files is not None:
            self._files.write(rank, text)
            return
        name = "server" if rank == SERVER else str(rank)
        file = sys.stderr if error or rank == SERVER else sys.stdout
        if self._live is not None and file.isatty():
            style = "dim" if rank == SERVER else _COLOURS[rank % len(_COLOURS)]
            self._console.print(Text(f"[{name}] ", style) + Text(text), soft_wrap=True)
        else:
            print(f"[{name}] {text}", file=file, flush=True)

    def say(self, text: str) -> None:
        """Show a sentence."""
        self._print(f"aiops: {text}", "yellow")

    def begun(self, rank: int, restarts: int) -> None:
        """Note that a process has begun."""
        if rank == SERVER:
            self._server = "starts"
        else:
            row = self._rows[rank]
            row.state, row.restarts = "starts", restarts

    def ended(self, rank: int, status: int) -> None:
        """Note that a process has ended."""
        state = "done" if status == 0 else formatting.ending(status)
        if rank == SERVER:
            self._server = state
        else:
            self._rows[rank].state, self._rows[rank].rate = state, 0.0

    def look(self, report: Mapping[str, Any] | None, busy: Mapping[int, float]) -> None:
        """Show the server's statistics."""
        now = time.monotonic()
        for rank, row in enumerate(self._rows):
            row.waited(busy.get(rank), now - self._looked)
        if report is not None:
            self._report, self._server = report, "serves"
            for rank, row in enumerate(self._rows):
                name = worker_name(rank)
                found = [entry for entry in report["workers"] if entry["name"] == name]
                if found:
                    row.update(found, now - self._looked)
        self._looked = now
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif now >= self._shown + _EVERY and report is not None:
            self._shown = now
            self._print(self._line())

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style), soft_wrap=True)

    def _line(self) -> str:
        """Return the run in one line."""
        report = self._report
        assert report is not None
        alive = sum(row.state == "trains" for row in self._rows)
        return (
            f"aiops: {formatting.seconds(time.monotonic() - self._began)}"
            f"  {report['policy']}  version {report['version']:,}  {self._progress(report)}"
            f"  staleness {report['mean_staleness']:.2f}"
            f"  {alive} of {len(self._rows)} workers train"
        )

    def _progress(self, report: Mapping[str, Any]) -> str:
        of = f"/{self._steps:,}" if self._steps else ""
        rate = report["gradients"] / report["seconds"] if report["seconds"] else 0.0
        return f"{report['gradients']:,}{of} gradients, {rate:,.0f} a second"

    def _table(self) -> RenderableType:
        report = self._report
        if report is None:
            return Text(f"the server {self._server}", "dim")
        shown = empty_table(
            *("worker", "state", "steps", "a second", "staleness", "idle", "pushed", "fetched"),
            gap=3,
        )
        for rank, row in list(enumerate(self._rows))[:_ROWS]:
            shown.add_row(*_cells(rank, row))
        parts: list[RenderableType] = ["", self._heading(report), shown]
        if len(self._rows) > _ROWS:
            parts.append(Text(f"and {len(self._rows) - _ROWS} more", "dim"))
        return Group(*parts)

    def _heading(self, report: Mapping[str, Any]) -> RenderableType:
        grid = Table.grid(padding=(0, 3))
        ran = formatting.seconds(time.monotonic() - self._began)
        cells: list[RenderableType] = [
            Text(report["policy"], "bold"),
            Text(f"the server {self._server}", "dim"),
            f"version {report['version']:,}",
            self._progress(report),
            ran,
        ]
        for _ in cells:
            grid.add_column(no_wrap=True)
        grid.add_row(*cells)
        if not self._steps:
            return grid
        done = min(report["gradients"], self._steps)
        rate = sum(row.rate for row in self._rows)
        left = f", {formatting.seconds((self._steps - done) / rate)} left" if rate else ""
        bar = Table.grid(padding=(0, 2))
        bar.add_row(
            ProgressBar(total=self._steps, completed=done, width=_BAR),
            f"{formatting.percent(done / self._steps)}{left}",
        )
        return Group(grid, bar)


def _cells(rank: int, row: _Row) -> tuple[str, ...]:
    entry = row.entry
    state = row.state + (f" (restart {row.restarts})" if row.restarts else "")
    if not entry:
        return (str(rank), state, *("–" * 6))
    idle = "–" if row.idle is None else f"{row.idle:.0%}"
    return (
        *(str(rank), state, f"{row.steps:,}", f"{row.rate:,.1f}", f"{entry['staleness']:,}", idle),
        *(formatting.nbytes(entry["bytes_pushed"]), formatting.nbytes(entry["bytes_fetched"])),
    )


@contextmanager
def watching(
    workers: int, steps: int | None, logs: Path | None, *, live: bool = True
) -> Iterator[Screen]:
    """Show a job until the end of the block."""
    with ExitStack() as stack:
        console = Console(stderr=True, highlight=False)
        yield stack.enter_context(Screen(workers, steps, logs, console, live=live))
