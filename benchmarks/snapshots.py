"""The snapshots benchmark: training beside the snapshots of a large state, and a restart from one.

    python -m benchmarks.snapshots [--parts dense,table,restart,follower] [--size 256MiB]
                                   [--rows 1000000] [--width 64] [--model 64MiB] [--every 10]
                                   [--seconds 60] [--rounds 5] [--folder FOLDER]
                                   [--json out.json] [--plot out.png]

**dense.** A server of ``fasgd`` (whose state is three times the model's ``size``, so that
a snapshot of 256 MiB is of 1 GiB) takes a snapshot every ``every`` seconds while a worker pushes
without a pause, over shared memory. It keeps no journal (``--acks applied``), so what is measured
is the snapshots' own. Each of the worker's steps is counted as *beside* a snapshot if it overlaps
the time from its capture to its name; the others are *alone*. Taken down are both rates, the rate
over whole periods of ``every`` and of 30 s, the longest step, the time for which updates waited for
a capture, and what the server's memory is more than that of one without a state, beside what it
says that a capture takes.

**table.** The same for a table of ``rows`` × ``width`` float32 with the state of ``asgd`` with
adagrad, while a worker pushes 512 rows at a time, of uniformly random ids. All rows are stored.

**restart.** A server with a state and a journal (``--acks written``) is killed while two workers
push to a model of another size, and started again. Taken down is the time from the start of its
process to the answer to the first push. Its modules are compiled to bytecode first, as those of an
installed package are: to do it at each start would take a fifth of a second.

**follower.** A worker pushes without a pause to a model of that size on three shards (``--shards 3
--acks written``), whose followers are killed in turn. Taken down is the time from a kill to the
answer to the first push that begins after it, beside the median of all.
"""

from __future__ import annotations

import compileall
import contextlib
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table as Grid

import aiops
from aiops.client import Client, Worker
from aiops.errors import AiopsError, UsageError
from aiops.lab.figures import Figure, Panel, Series
from aiops.lab.run_record import machine, record
from aiops.model.tables import Table
from aiops.state.directory import PART
from benchmarks import report
from benchmarks.compare import Cell
from benchmarks.serving import serving
from benchmarks.sizes import MIB, format_size, parse_size

TEMPORARY = "temporary"
_ON_DISK = Path("/var/tmp")  # is to outlive a restart, so it is not in memory
_TENSOR, _POLICY = "w", "fasgd"
_TABLE_POLICY, _TABLE_FLAGS = "asgd", ("--set=optimizer=adagrad",)
_TABLE_ARRAYS, _BATCH = 2, 512  # parameters and adagrad's sums; rows of a push
PARTS = ("dense", "table", "restart", "follower")
_USUAL = 30.0  # seconds between snapshots, unless --snapshot-every says otherwise
_OFTEN, _SHORT = 0.002, 5.0  # seconds
_SHARDS = 3
_GOALS = {"ratio": 0.9, "restart": 2.0}


@dataclass(frozen=True)
class Options:
    """The options of the benchmark; sizes are bytes."""

    parts: Annotated[tuple[str, ...], "that are measured"] = PARTS
    size: Annotated[int, "of the model beside whose training snapshots are taken", parse_size] = (
        256 * MIB
    )
    rows: Annotated[int, "of the table beside whose training snapshots are taken"] = 1_000_000
    width: Annotated[int, "of its rows"] = 64
    model: Annotated[int, "of the model whose servers are killed", parse_size] = 64 * MIB
    every: Annotated[float, "seconds from one snapshot to the next"] = 10.0
    seconds: Annotated[float, "of training beside snapshots"] = 60.0
    load: Annotated[float, "seconds of training before a server is killed"] = 5.0
    rounds: Annotated[int, "restarts, and kills of followers"] = 5
    folder: Annotated[str, "in which the states are kept while they are measured"] = TEMPORARY

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if set(self.parts) - set(PARTS) or not self.parts:
            raise UsageError(f"the parts to measure are {', '.join(PARTS)}")
        if (
            min(
                self.rows,
                self.width,
                self.size,
                self.model,
                self.every,
                self.seconds,
                self.load,
                self.rounds,
            )
            <= 0
        ):
            raise UsageError("sizes, rows, seconds and rounds are positive")
        if self.seconds < 2 * self.every:
            raise UsageError(
                "--seconds must be two of --every at least, to have both kinds of step"
            )
        if self.folder != TEMPORARY and not Path(self.folder).is_dir():
            raise UsageError(f"--folder {self.folder}: there is no such folder")

    def place(self) -> Path:
        """Return the folder in which the states are kept."""
        if self.folder != TEMPORARY:
            return Path(self.folder).resolve()
        return _ON_DISK if _ON_DISK.is_dir() else Path(tempfile.gettempdir())


@dataclass
class Watch:
    """The snapshots in a server's folder, and its memory, seen from outside."""

    folder: Path
    pid: int
    spans: list[tuple[float, float]] = field(default_factory=list)  # of writing
    most: int = 0  # bytes of memory

    _names: set[str] | None = None  # of whole snapshots, at the last look
    _looked: float = 0.0
    _began: float | None = None

    def watch(self, done: threading.Event) -> None:
        """Look again and again until ``done``."""
        while not done.wait(_OFTEN):
            self.look(time.perf_counter())
            self.most = max(self.most, memory_of(self.pid))

    def look(self, now: float) -> None:
        """Note what has changed: a small snapshot may be written between two looks."""
        names = {path.name for path in self.folder.glob("snapshot-*")}
        whole = {name for name in names if not name.endswith(PART)}
        missed = self._names is not None and bool(whole - self._names)
        if names != whole:
            self._began = now if self._began is None else self._began
        elif self._began is not None or missed:
            self.spans.append((self._looked if self._began is None else self._began, now))
            self._began = None
        self._names, self._looked = whole, now


def memory_of(pid: int) -> int:
    """Return the bytes of a process's memory, without files that it has mapped."""
    found = 0
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                found += int(line.split()[1]) * 1024
    return found


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: the parts that are asked for.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    options.check()
    about, found = machine(), dict[str, Any]()
    compileall.compile_dir(Path(aiops.__file__).parent, quiet=2)  # as an installation is
    with tempfile.TemporaryDirectory(prefix="aiops-snapshots-", dir=options.place()) as name:
        for part in ("dense", "table"):
            if part in options.parts:
                load = Load.of(part, options)
                log(f"training {format_size(load.nbytes)} ({part}) for {options.seconds:g} s")
                found[part] = _beside(options, load, Path(name, part))
        if "restart" in options.parts:
            restarts = []
            for number in range(options.rounds):
                log(f"restart {number + 1} of {options.rounds}")
                restarts.append(_restart(options, Path(name, f"restart-{number}")))
            spreads = {key: report.spread([one[key] for one in restarts]) for key in restarts[0]}
            found["restart"] = {"rounds": restarts, **spreads}
        if "follower" in options.parts:
            log(f"{options.rounds} kills of followers")
            found["follower"] = _lost_followers(options, Path(name, "follower"))
    return record("benchmark", "snapshots", options, found, about)


@dataclass(frozen=True)
class Load:
    """Training beside which snapshots are taken.

    Attributes
    ----------
    flags
        Of the server.
    nbytes
        Of its state.
    join
        Makes a worker, given the URL.
    begin
        Brings the server to the state of which snapshots are taken, and returns a step.
    """

    policy: str
    flags: Sequence[str]
    nbytes: int
    join: Callable[[str], Worker]
    begin: Callable[[Worker], Callable[[], object]]

    @classmethod
    def of(cls, part: str, options: Options) -> Load:
        """Return the training of a part of the benchmark."""
        if part == "dense":
            model, gradient = _arrays(options.size)
            join = partial(Worker, params=model)
            return cls(_POLICY, (), 4 * options.size, join, lambda worker: _step(worker, gradient))
        table = Table(options.rows, options.width)
        nbytes = _TABLE_ARRAYS * table.nbytes
        join = partial(Worker, params={}, tables={_TENSOR: table})
        return cls(_TABLE_POLICY, _TABLE_FLAGS, nbytes, join, partial(_fill, table=table))


def _step(worker: Worker, gradient: dict[str, Any]) -> Callable[[], object]:
    worker.step(gradient)  # the buffers are made
    return partial(worker.step, gradient)


def _fill(worker: Worker, table: Table) -> Callable[[], object]:
    """Push to all rows; return a step that pushes to random ones."""
    rows, random = table.rows, np.random.default_rng(0)
    grads = np.full((_BATCH << 6, table.width), 1e-3, np.float32)
    for ids in np.split(np.arange(rows), range(len(grads), rows, len(grads))):
        worker.push_rows(_TENSOR, ids, grads[: len(ids)])
    return lambda: worker.push_rows(_TENSOR, random.integers(0, rows, _BATCH), grads[:_BATCH])


def _beside(options: Options, load: Load, folder: Path) -> dict[str, Any]:
    without = _without(options, load)
    flags = [f"--state={folder}", "--acks=applied", f"--snapshot-every={options.every}"]
    done, steps = threading.Event(), list[tuple[float, float]]()
    with serving(load.policy, *load.flags, *flags) as (url, pid), load.join(url) as worker:
        step = load.begin(worker)
        first = worker.stats()["state"]["snapshot"]
        while worker.stats()["state"]["snapshot"] == first:  # the next one has all that there is
            step()
        watch = Watch(folder, pid)
        watching = threading.Thread(target=watch.watch, args=(done,), daemon=True)
        watching.start()
        try:
            until = time.perf_counter() + options.seconds
            while (begun := time.perf_counter()) < until:
                step()
                steps.append((begun, time.perf_counter()))
        finally:
            done.set()
            watching.join()
        state = worker.stats()["state"]
    return {**summary(options, steps, watch, without, state), "state_bytes": load.nbytes}


def _without(options: Options, load: Load) -> int:
    """Return the most memory, in bytes, of the same server without a state."""
    most = 0
    with serving(load.policy, *load.flags) as (url, pid), load.join(url) as worker:
        step, until = load.begin(worker), time.perf_counter() + min(options.every, _SHORT)
        while time.perf_counter() < until:
            step()
            most = max(most, memory_of(pid))
    return most


def summary(
    options: Options,
    steps: Sequence[tuple[float, float]],
    watch: Watch,
    without: int,
    state: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the figures of training beside snapshots.

    Parameters
    ----------
    options
        Of the benchmark.
    steps
        Of the worker: when each began and ended.
    watch
        The times of writing, and the memory.
    without
        Bytes of memory of a server without a state.
    state
        The server's statistics of its state.

    Raises
    ------
    RuntimeError
        When there was no snapshot, or no time without.
    """
    pause = state["capture_seconds"]
    spans = [(begin - pause, end) for begin, end in watch.spans]
    beside, alone = list[float](), list[float]()
    for begin, end in steps:
        overlaps = any(begin < stop and end > start for start, stop in spans)
        (beside if overlaps else alone).append(end - begin)
    if not beside or not alone:
        raise RuntimeError("there was no snapshot, or no time without one: see --every, --seconds")
    rates = [len(each) / sum(each) for each in (beside, alone)]
    lasting = sum(beside) / len(spans)  # seconds of steps beside one snapshot
    lost = lasting * (1 - rates[0] / rates[1])
    return {
        "steps_beside": rates[0],
        "steps_alone": rates[1],
        "beside": rates[0] / rates[1],
        "ratio": 1 - lost / max(options.every, lasting),
        "usual": 1 - lost / max(_USUAL, lasting),
        "snapshots": len(spans),
        "seconds": sum(end - begin for begin, end in watch.spans) / len(spans),
        "longest_beside": max(beside),
        "longest_alone": max(alone),
        "median_step": float(np.median(alone)),
        "pause": pause,
        "memory": watch.most - without,
        "capture_bytes": state["capture_bytes"],
    }


def _arrays(nbytes: int) -> tuple[dict[str, Any], dict[str, Any]]:
    model = {_TENSOR: np.zeros(nbytes // 4, np.float32)}
    return model, {_TENSOR: np.full(nbytes // 4, 1e-3, np.float32)}


def _restart(options: Options, folder: Path) -> dict[str, float]:
    """Kill a server and start it again; return the seconds to its URL and to a push's answer."""
    model, gradient = _arrays(options.model)
    flags = [f"--state={folder}", "--acks=written"]
    with serving(_POLICY, *flags) as (url, pid):
        threads = [threading.Thread(target=_push, args=(url, model, gradient)) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(options.load)
        os.kill(pid, signal.SIGKILL)
        for thread in threads:
            thread.join()
    nbytes = sum(path.stat().st_blocks * 512 for path in folder.iterdir())
    began = time.perf_counter()
    with serving(_POLICY, *flags) as (url, _pid):
        listening = time.perf_counter()
        with Client(url, role="worker", name="restart") as client:
            client.push(client.fetch(), gradient)
            pushed = time.perf_counter()
            version = client.fetch().version
    return {
        "url": listening - began,
        "push": pushed - began,
        "version": version,
        "folder_bytes": nbytes,
    }


def _push(url: str, model: dict[str, Any], gradient: dict[str, Any]) -> None:
    """Push until the server is gone."""
    with contextlib.suppress(AiopsError), Worker(url, model, timeout=1) as worker:
        while True:
            worker.step(gradient)


def _lost_followers(options: Options, folder: Path) -> dict[str, Any]:
    """Kill followers in turn; return how long a push waits then, and usually."""
    model, gradient = _arrays(options.model)
    flags = [f"--shards={_SHARDS}", "--shard-bytes=1", f"--state={folder}", "--acks=written"]
    steps, over = list[tuple[float, float]](), threading.Event()

    def push() -> None:
        with Worker(url, model) as worker:
            while not over.is_set():
                began = time.perf_counter()
                worker.step(gradient)
                steps.append((began, time.perf_counter()))

    with serving(_POLICY, *flags) as (url, pid):
        thread, kills = threading.Thread(target=push), list[float]()
        thread.start()
        for _ in range(options.rounds):
            time.sleep(options.load)
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            kills.append(time.perf_counter())
            os.kill(int(children[0]), signal.SIGKILL)  # the oldest: what is started again is last
            while not steps or steps[-1][0] < kills[-1]:
                time.sleep(_OFTEN)
        over.set()
        thread.join()
    waits = [min(end for begin, end in steps if begin > kill) - kill for kill in kills]
    usual = statistics.median(end - begin for begin, end in steps)
    return {"rounds": waits, "wait": report.spread(waits), "usual": usual}


def table(result: Mapping[str, Any]) -> Grid:
    """Make the table of a report."""
    options, rows = result["options"], list[list[str]]()
    for part in ("dense", "table"):
        if part in result:
            rows += [*_training_rows(part, result[part], options["every"]), []]
    if "restart" in result:
        restart, size = result["restart"], format_size(options["model"])
        rows += [
            [f"restart with {size}, to URL", f"{restart['url']['median']:.2f}"],
            ["to the first push", f"{restart['push']['median']:.2f}"],
        ]
        for row, key in zip(rows[-2:], ("url", "push"), strict=True):
            row.append(_range(restart[key]))
    if "follower" in result:
        wait, usual = result["follower"]["wait"], result["follower"]["usual"]
        rows += [
            ["a push waits for a killed follower", f"{wait['median']:.2f}", _range(wait)],
            ["another push takes", f"{1e3 * usual:.1f}", "ms"],
        ]
    return report.table("Snapshots beside training, and restarts", ("", "median", ""), rows)


def _training_rows(part: str, beside: Mapping[str, Any], every: float) -> list[list[str]]:
    """Return the rows of one kind of training."""
    return [
        [f"{part}: state", f"{beside['state_bytes'] / MIB:,.0f}", "MiB"],
        ["throughput beside a snapshot", f"{beside['beside']:.2f}", "of that alone"],
        ["throughput, one every 30 s", f"{beside['usual']:.3f}", "of that without"],
        [f"throughput, one every {every:g} s", f"{beside['ratio']:.3f}", "of that without"],
        ["one snapshot is written in", f"{beside['seconds']:.2f}", "s"],
        ["updates wait for its capture", f"{1e3 * beside['pause']:.1f}", "ms"],
        ["longest step beside one", f"{1e3 * beside['longest_beside']:.1f}", "ms"],
        ["longest step alone", f"{1e3 * beside['longest_alone']:.1f}", "ms"],
        ["median step alone", f"{1e3 * beside['median_step']:.2f}", "ms"],
        ["memory for snapshots", f"{beside['memory'] / MIB:,.0f}", "MiB"],
        ["which the server tells as", f"{beside['capture_bytes'] / MIB:,.0f}", "MiB, at most"],
    ]


def _range(spread: Mapping[str, float]) -> str:
    return f"s ({spread['min']:.2f} to {spread['max']:.2f})"


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goals, for below the table."""
    for part in ("dense", "table"):
        if part in result:
            yield (
                f"{part}: throughput is to be {_GOALS['ratio']} of that without:"
                f" {result[part]['beside']:.2f} beside a snapshot"
            )
    if "restart" in result:
        yield (
            f"the first push is to be answered within {_GOALS['restart']:g} s of a restart:"
            f" {result['restart']['push']['median']:.2f} s"
        )


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for part in ("dense", "table"):
        if part in result:
            yield Cell.once(f"{part}, beside a snapshot", "throughput", result[part]["beside"])
            yield Cell.once(f"{part}, capture", "pause, s", result[part]["pause"], less=True)
    if "restart" in result:
        yield Cell.of("restart", "first push, s", result["restart"]["push"], less=True)
    if "follower" in result:
        yield Cell.of("killed follower", "wait, s", result["follower"]["wait"], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the rates of training, and the times of restarts."""
    panels, ticks = [], ["alone", "beside a snapshot"]
    for part in ("dense", "table"):
        if part in result:
            both = [[result[part]["steps_alone"], result[part]["steps_beside"]]]
            rates = Series("steps/s", [0, 1], both, "bars")
            panels.append(Panel(part, "server", "steps/s", [rates], bottom=0, ticks=ticks))
    if "restart" in result:
        times = [[one["url"], one["push"]] for one in result["restart"]["rounds"]]
        took, ticks = Series("seconds", [0, 1], times, "bars", median=True), ["URL", "push"]
        panels.append(Panel("restart", "first answer", "s", [took], bottom=0, ticks=ticks))
    if "follower" in result:
        waits = [[each] for each in result["follower"]["rounds"]]
        took = Series("seconds", [0], waits, "bars", median=True)
        panels.append(Panel("killed follower", "a push waits", "s", [took], bottom=0, ticks=[""]))
    return Figure("Snapshots of a server's state", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, notes=notes)


if __name__ == "__main__":
    main()
