"""The soak benchmark: whether a server's memory grows, over minutes and hours of a mixed load.

    python -m benchmarks.soak [--minutes 10] [--cells tcp,same-host,shards] [--size 4MiB]
                              [--seats 4] [--known 4096] [--share 0.2] [--policy fasgd]
                              [--seed 0] [--json out.json] [--plot out.png]

Each cell is a server with a crowd of its own (`benchmarks.crowd`): clients that come, push all or
some of the tensors in several codecs, exchange, fetch, hold versions for a while, and leave, some
of them in the middle of a message. All cells run at once, and slowly: all clients together have
``--share`` of a core. The servers' memory (own pages, and shared segments once and in full) is
looked at all the time. Before it counts, as many clients come and go as a server remembers
(``--known``), and a tenth of the time goes by, for pools to have filled.

* ``tcp``: over TCP, codecs both ways, a table, a third of the clients behind a slow line;
* ``same-host``: in shared memory, half of the trainers with ``views``;
* ``shards``: over TCP and two shards, gradients in codecs; the memory is that of both processes.

``drift`` is the mean of the last tenth of the time beside that of the first. ``slope`` is a least
squares line's through the means of 60 stretches of time, ± the half of its 95 % confidence
interval; memory now is like memory a moment ago, so its error is that of Newey and West (1987,
"A simple, positive semi-definite, heteroskedasticity and autocorrelation consistent covariance
matrix", with a Bartlett kernel). ``second half`` is the same from the middle on: pools, and what is
kept of those who left in the middle of something, fill for a while, and what leaks goes on leaking.
Memory is said to grow if both slopes are beyond their errors. In the end every answered push must
have been applied, and none that was not sent.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from rich.table import Table

import aiops
from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from benchmarks import footprint, report
from benchmarks.compare import Cell
from benchmarks.crowd import PATIENCE, ClientTally, Crowd, Governor, model
from benchmarks.footprint import Sample, Watch, family
from benchmarks.serving import serving
from benchmarks.sizes import KIB, MIB, format_size, size_flag

_PUSHED = ("topk:0.01@a*", "int8@b*", "onebit@c*", "lowrank:4@d*")
_FETCHED = ("topk:0.05@a*", "int8@b*", "fp16@c*")
_CODED = [flag for codec in _PUSHED for flag in ("--push-codec", codec)]
CELLS: Mapping[str, tuple[str, ...]] = {
    "tcp": ("--no-shm", *_CODED, *(f for codec in _FETCHED for f in ("--fetch-codec", codec))),
    "same-host": (),
    "shards": ("--no-shm", "--shards", "2", "--shard-bytes", "4096", *_CODED),
}
"""The flags of each server."""
_PATIENT = ("--failure-timeout", f"{PATIENCE}", "--stall-deadline", f"{PATIENCE}")
"""Over an hour a machine may be suspended, or all processes be stopped."""
BLOCKS = 60
_WARM = 0.1  # of the time, which does not count
_LOOKS = 10  # in each block
_OFTEN = 2.0  # seconds between looks, at most
_ASKED = 10  # looks for each request of a server's statistics of its versions
_FEWEST = 10  # looks that a verdict needs
_SMALL = 64 * KIB
_TELLING = 5  # minutes
_FLAT = 0.02  # of the memory: a growth that is none


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    minutes: float = 10.0
    cells: Annotated[tuple[str, ...], "cells"] = tuple(CELLS)
    size: Annotated[int, "of the parameters", size_flag] = 4 * MIB
    seats: Annotated[int, "clients at a time, of each server"] = 4
    known: Annotated[int, "clients that come and go before"] = 4096
    share: Annotated[float, "of a core, for all processes; 2: as fast as two cores can"] = 0.2
    policy: str = "fasgd"
    seed: int = 0

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.minutes, self.seats, self.share) <= 0 or self.known < 0 or self.size < _SMALL:
            raise UsageError(
                f"minutes, seats and share are positive, and the size at least {_SMALL >> 10} KiB"
            )
        for name in self.cells:
            if name not in CELLS:
                raise UsageError(f"no cell is called {name!r}; {nearest(name, CELLS)}")
        footprint.check(self.policy)


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell per server, with its memory block by block.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, seconds = machine(), 60 * options.minutes
    interval = min(_OFTEN, seconds / BLOCKS / _LOOKS)
    params, over = model(options.size), threading.Event()
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(serving(options.policy, *_PATIENT, *CELLS[name]))
            for name in options.cells
        }
        families = {name: family(pid) for name, (_url, pid) in servers.items()}
        processes = [pid for pids in families.values() for pid in pids]
        log(f"{len(servers)} servers meet {options.known:,} clients each")
        crowds = dict[str, Crowd]()
        for number, (name, (url, _pid)) in enumerate(servers.items()):
            crowds[name] = Crowd(
                *(url, options.seats, params),
                near="--no-shm" not in CELLS[name],
                table=name == "tcp",
                known=options.known,
                seed=options.seed + number,
            )
            stack.enter_context(crowds[name])
        stack.callback(over.set)  # before a crowd is waited for, however this ends
        governor, watches = Governor(options.share, processes, over), dict[str, Watch]()
        for name, (url, _pid) in servers.items():
            watches[name] = stack.enter_context(
                Watch(families[name], url, interval, PATIENCE, _ASKED)
            )
            crowds[name].begin(governor)
        _wait(seconds, watches, crowds, log)
        over.set()
        used = governor.used
        found = [
            _cell(name, options, watches[name], crowds[name], servers[name][0], seconds)
            for name in servers
        ]
    return record(
        "benchmark",
        "soak",
        options,
        {
            "share": used,
            "cells": found,
        },
        about,
    )


def _wait(
    seconds: float,
    watches: Mapping[str, Watch],
    crowds: Mapping[str, Crowd],
    log: Callable[[str], None],
) -> None:
    """Wait that long, unless a client fails; report the state now and then."""
    begin, told = time.monotonic(), 0.0
    while (gone := time.monotonic() - begin) < seconds:
        if any(crowd.failed() for crowd in crowds.values()):
            return
        if gone >= told + max(60.0, seconds / BLOCKS):
            told = gone
            held = ", ".join(
                f"{name} {_total(watch.samples[-1]) / MIB:.1f} MiB"
                for name, watch in watches.items()
                if watch.samples
            )
            log(f"{gone / 60:.0f} of {seconds / 60:g} min: {held}")
        time.sleep(min(1.0, seconds - gone))


def _total(sample: Sample) -> int:
    return sample.own + sample.segments


def _cell(
    name: str, options: Options, watch: Watch, crowd: Crowd, url: str, seconds: float
) -> dict[str, Any]:
    watch.close()
    cell: dict[str, Any] = {"cell": name, "failed": None}
    try:
        crowd.close()
        crowd.check()
        tally = crowd.tally
        if not tally.calls:
            raise ValueError(
                "no client made a call: watching alone took more than --share of a core"
            )
        cell |= {
            key: getattr(tally, key)
            for key in ("clients", "rude", "calls", "pushed", "attempted", "rows")
        }
        with aiops.Client(url, timeout=PATIENCE) as client:
            check(tally, int(client.stats()["gradients"]))
        samples = [sample for sample in watch.samples if sample.seconds >= _WARM * seconds]
        if len(samples) < _FEWEST:
            raise ValueError(f"the server's memory was seen {len(samples)} times only")
        return cell | _figures(samples)
    except Exception as error:  # whatever a client met with: the other cells are whole
        return cell | {"failed": f"{type(error).__name__}: {error}"}


def check(tally: ClientTally, applied: int) -> None:
    """Raise ValueError unless all answered pushes were applied, and none that was not sent."""
    if not tally.pushed <= applied <= tally.attempted:
        raise ValueError(
            f"{tally.pushed:,} pushes were answered and {tally.attempted:,} sent, but the server"
            f" applied {applied:,}"
        )


def _figures(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the figures of a server's memory."""
    count = min(BLOCKS, len(samples))
    parts = np.array_split(np.arange(len(samples)), count)
    blocks = []
    for part in parts:
        here = [samples[index] for index in part]
        totals = [_total(sample) for sample in here]
        blocks.append(
            {
                "seconds": statistics.fmean(sample.seconds for sample in here),
                "bytes": round(statistics.fmean(totals)),
                "min": min(totals),
                "max": max(totals),
                "segments": round(statistics.fmean(sample.segments for sample in here)),
                "alive": max(sample.alive for sample in here),
            }
        )
    tenth = count // 10
    means = [float(block["bytes"]) for block in blocks]
    first, last = statistics.fmean(means[:tenth]), statistics.fmean(means[-tenth:])
    hours = [block["seconds"] / 3600 for block in blocks]
    slope, error = trend(hours, means)
    late_slope, late_error = trend(hours[count // 2 :], means[count // 2 :])
    return {
        "samples": len(samples),
        "versions_alive": max(block["alive"] for block in blocks),
        "first_tenth_bytes": round(first),
        "last_tenth_bytes": round(last),
        "drift": last / first - 1,
        "slope_bytes_per_hour": slope,
        "slope_error": error,
        "late_slope_bytes_per_hour": late_slope,
        "late_slope_error": late_error,
        "peak_bytes": max(block["max"] for block in blocks),
        "blocks": blocks,
    }


def trend(x: npt.ArrayLike, y: npt.ArrayLike) -> tuple[float, float]:
    """Return the slope of a least squares line, and half the width of its 95 % confidence interval.

    Parameters
    ----------
    x, y
        Three points at least, by time: neighbours' errors may be alike (Newey and West 1987; the
        Bartlett kernel reaches as far as the cube root of their number).
    """
    at, values = np.asarray(x, float), np.asarray(y, float)
    at = at - at.mean()
    square = float(at @ at)
    slope = float(at @ values) / square
    scores = at * (values - values.mean() - slope * at)
    count = len(scores)
    reach = round(count ** (1 / 3))
    total = float(scores @ scores)
    for lag in range(1, reach + 1):
        total += 2 * (1 - lag / (reach + 1)) * float(scores[lag:] @ scores[:-lag])
    free = count - 2
    return slope, _student(free) * (count / free * max(total, 0.0)) ** 0.5 / square


def _student(free: int) -> float:
    """Return the 97.5th percentile of Student's t (Abramowitz and Stegun 1964, 26.7.5)."""
    z = statistics.NormalDist().inv_cdf(0.975)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / free + second / free**2 + third / free**3


def grows(cell: Mapping[str, Any]) -> bool:
    """Tell whether memory grew, by what is more than nothing, and went on growing."""
    grew, grows = (
        cell[f"{late}slope_bytes_per_hour"] > cell[f"{late}slope_error"] for late in _HALF
    )
    return bool(grew and grows and cell["drift"] > _FLAT)


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows = []
    for cell in result["cells"]:
        if cell["failed"]:
            rows.append([cell["cell"], "failed", *["-"] * (len(_COLUMNS) - 2)])
            continue
        rows.append(
            [
                *(cell["cell"], f"{cell['clients']:,}", f"{cell['rude']:,}", f"{cell['calls']:,}"),
                *(f"{cell['pushed']:,}", str(cell["versions_alive"])),
                *(_mib(cell[f"{tenth}_tenth_bytes"]) for tenth in ("first", "last")),
                f"{cell['drift']:+.2%}",
                *(
                    f"{cell[f'{late}slope_bytes_per_hour'] / MIB:.1f} ±"
                    f" {cell[f'{late}slope_error'] / MIB:.1f}"
                    for late in _HALF
                ),
                _mib(cell["peak_bytes"]),
            ]
        )
    options = result["options"]
    title = (
        f"A server's memory in MiB over {options['minutes']:g} minutes of a mixed load:"
        f" {options['policy']}, {format_size(options['size'])} of parameters, {options['seats']}"
        f" clients at a time, {result['share']:.0%} of a core for all"
    )
    return report.table(title, _COLUMNS, rows)


_COLUMNS = (
    *("server", "clients", "cut off", "calls", "pushes", "versions", "first tenth", "last tenth"),
    *("drift", "slope an hour", "second half", "peak"),
)

_HALF = ("", "late_")  # slopes: of all the time, and of its second half


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.2f}"


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return one line per cell that failed."""
    return [f"{cell['cell']}: {cell['failed']}" for cell in result["cells"] if cell["failed"]]


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goal, for below the table."""
    whole = [cell for cell in result["cells"] if not cell["failed"]]
    if result["options"]["minutes"] < _TELLING:
        yield f"in less than {_TELLING} minutes, growth is not told from pools that fill"
    elif growing := [cell["cell"] for cell in whole if grows(cell)]:
        yield f"memory grows: {', '.join(growing)}"
    elif whole and (most := max(cell["drift"] for cell in whole)) > _FLAT:
        yield f"memory grew by {most:.1%} at most, and does not go on growing"
    elif whole:
        yield f"memory does not grow by more than {_FLAT:.0%}"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: the last tenth of the time, and the peak."""
    options = result["options"]
    load = f"{options['policy']}, {format_size(options['size'])}, {options['seats']} clients"
    for cell in result["cells"]:
        if not cell["failed"]:
            where = f"{cell['cell']}, {load}, {options['minutes']:g} min"
            first = cell["first_tenth_bytes"]
            for what, key in (("last tenth", "last_tenth_bytes"), ("peak", "peak_bytes")):
                yield Cell.once(where, what, cell[key] / first, beside="first tenth", less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw memory over time, block by block, a panel per server."""
    panels = []
    for cell in result["cells"]:
        blocks = cell.get("blocks", ())
        minutes = [block["seconds"] / 60 for block in blocks]
        held = [[block[key] / MIB for block in blocks] for key in ("bytes", "min", "max")]
        lines = [Series("held: mean, least and most of a block", minutes, held, median=True)]
        if any(block["segments"] for block in blocks):
            shared = [[block["segments"] / MIB for block in blocks]]
            lines.append(Series("of it in shared segments", minutes, shared))
        top = 1.1 * max((block["max"] / MIB for block in blocks), default=1.0)
        panels.append(Panel(cell["cell"], "minutes", "MiB", lines, bottom=0, top=top))
    minutes = result["options"]["minutes"]
    return Figure(f"A server's memory, {minutes:g} minutes of a mixed load", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when something failed, 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, failures=failures, notes=notes)


if __name__ == "__main__":
    main()
