"""All benchmarks, one after the other: ``aiops bench all``.

    python -m benchmarks.suite [--quick] [--out FOLDER] [--only exchange,kernels]

Each runs in a process of its own as one would run it by hand, at the settings that
docs/results/README.md documents, or ``--quick`` at ones that take some seconds: a look at whether
everything works, rather than a measurement. FOLDER gets NAME.json, NAME.txt and NAME.png of each.
One that fails is told at the end, and the others run all the same.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shlex
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from aiops.common import formatting
from aiops.errors import UsageError, nearest
from aiops.kernels import cupy_device
from aiops.lab.processes import ONE_THREAD, ChildProcess, command
from benchmarks import links, report

FOLDER = Path("bench-results")
_ROOT = Path(__file__).resolve().parents[1]
_LAST = 4  # last lines of a failed benchmark's output that are shown
_GRACE = 30.0  # seconds that one has to end its processes


@dataclass(frozen=True)
class Entry:
    """One benchmark of the suite.

    Attributes
    ----------
    settings, quick
        Its command line after ``aiops bench``, as documented and in a hurry.
    seconds, hurried
        About how long these take: from this the time left is estimated, corrected by what has run.
    alone
        Whether it is to have one core and one thread.
    missing
        Says why it cannot run here; None: it can.
    """

    settings: str
    quick: str
    seconds: float
    hurried: float
    alone: bool = False
    missing: Callable[[], str | None] = lambda: None

    def command(self, *, quick: bool) -> list[str]:
        """Return it as arguments: the benchmark's name, and its flags."""
        settings = self.settings.split()
        return [settings[0], *self.quick.split()] if quick else settings


def _no_gpu() -> str | None:
    try:
        cupy_device.opened("cuda")
    except UsageError as error:
        return str(error)
    return None


def _no_ray() -> str | None:
    return None if importlib.util.find_spec("ray") else "Ray is not installed"


ENTRIES: Mapping[str, Entry] = {
    "exchange": Entry(
        "exchange --sizes 4KiB,64KiB,1MiB,16MiB,64MiB --rounds 3",
        "--sizes 4KiB,1MiB --workers 1 --peers raw,aiops,pyzmq,gloo --rounds 2 --seconds 0.1",
        *(400, 15),
    ),
    "exchange-same-host": Entry(
        "exchange --peers memcpy,shared,room,views,mpi,ray --sizes 4KiB,64KiB,1MiB,16MiB,64MiB"
        " --rounds 5 --seconds 0.3",
        "--peers memcpy,shared,views --sizes 4KiB,1MiB --workers 1 --rounds 2 --seconds 0.1",
        *(360, 12),
    ),
    "pipelining": Entry(
        "pipelining --rounds 2",
        "--in-flight 1,8 --ways exchange --rounds 2 --seconds 0.1",
        *(90, 12),
    ),
    "scale": Entry(
        "scale --rounds 3",
        "--sizes 4KiB --workers 1,4 --shards 1,2 --shard-workers 2 --peers none --rounds 2"
        " --seconds 0.1",
        *(240, 16),
    ),
    "scrape": Entry(
        "scrape", "--workers 2 --tensors 4 --rounds 1 --seconds 0.5 --scrapes 2", 90, 4
    ),
    "dashboard": Entry(
        "dashboard", "--workers 3 --tensors 4 --rounds 1 --seconds 0.3 --watch 0", 180, 8
    ),
    "startup": Entry("startup", "--sizes 4KiB --caches warm --rounds 2", 240, 10),
    "directions": Entry("directions", "--sides 64 --matrices 2 --rounds 3", 60, 2),
    "torch_steps": Entry(
        "torch_steps --width 256 --blocks 4 --batch 8 --steps 5",
        "--width 64 --blocks 1 --batch 2 --steps 2 --rounds 2",
        *(60, 4),
    ),
    "trackers": Entry(
        "trackers",
        "--width 16 --blocks 1 --batch 2 --seconds 0.3 --rounds 1 --warm 0.2",
        *(450, 8),
    ),
    "tracked_steps": Entry("tracked_steps", "--rounds 2 --block 0.1 --every 0.05", 360, 8),
    "sharing": Entry("sharing --rounds 5", "--sizes 1MiB --rounds 2", 90, 8),
    "policies": Entry(
        "policies --rounds 3 --seconds 0.3",
        "--sizes 4KiB --policies fasgd,hardsync --rounds 2 --seconds 0.1",
        *(150, 9),
    ),
    "memory": Entry(
        "memory",
        "--size 16MiB --seconds 1 --transports tcp,views",
        *(120, 14),
    ),
    "soak": Entry(
        "soak --minutes 60",
        "--minutes 0.1 --size 256KiB --cells tcp,same-host --seats 2 --known 20 --share 2",
        *(3620, 9),
    ),
    "kernels": Entry("kernels", "--size 1000000 --repeats 5", 25, 4),
    "gpu": Entry("gpu", "--size 1000000 --repeats 5", 60, 10, missing=_no_gpu),
    "codecs": Entry("codecs", "--size 1000000 --repeats 5", 60, 9),
    "tables": Entry(
        "tables --rounds 9",
        "--rows 100000 --workers 2 --rounds 2 --seconds 0.3",
        *(60, 6),
    ),
    "acks": Entry(
        "acks --rounds 5",
        "--sizes 4KiB --workers 1 --codecs raw --acks written,durable --rounds 2 --seconds 0.1",
        *(240, 8),
    ),
    "coded": Entry(
        "coded --rounds 5",
        "--sizes 4KiB --workers 1 --codecs raw/raw,int8/raw --rounds 2 --seconds 0.1",
        *(60, 4),
    ),
    "snapshots": Entry(
        "snapshots --seconds 20 --rounds 5",
        "--size 8MiB --model 1MiB --every 0.5 --seconds 2 --load 0.5 --rounds 1",
        *(150, 4),
    ),
    "filter": Entry(
        "filter --sizes 16MiB,4KiB --shards 1,2 --rounds 5 --seconds 0.3",
        "--sizes 4KiB --policies asgd --rounds 1 --seconds 0.1",
        *(180, 6),
    ),
    "hostile": Entry(
        "hostile --rounds 4 --seconds 6",
        "--size 1MiB --workers 1 --readers 4 --writers 4 --rounds 1 --seconds 0.3",
        *(120, 6),
    ),
    "algorithms": Entry(
        "algorithms",
        "--dataset digits --parts accuracy --only asgd,fasgd --seeds 1 --variant-seeds 0"
        " --epochs 2 --workers 2",
        *(1500, 7),
    ),
    "ray": Entry(
        "ray",
        "--parts steps --sizes 4KiB --seconds 0.3 --rounds 1",
        *(300, 25),
        missing=_no_ray,
    ),
    "overlap": Entry(
        "overlap",
        "--overlaps 0 --hidden 16 --compute 0.01 --rounds 1 --seconds 1",
        *(380, 8),
    ),
    "learning": Entry(
        "learning",
        "--network perceptron --rules schedule-free --compute 0.01 --seconds 0.5",
        *(400, 5),
    ),
    "ddp": Entry(
        "ddp --rates 0.001,0.003,0.006",
        "--workers 1 --steps 1 --rates 0.003 --schedules cosine",
        *(420, 10),
    ),
    "link": Entry(
        "link",
        "--rates 1Gbit/s --codecs raw,int8 --mib 1 --rounds 2 --seconds 0.2",
        *(240, 9),
    ),
    "links": Entry(
        "links", "--size 1MiB --servers 2 --workers 1 --seconds 1", 420, 4, missing=links.missing
    ),
    "clock": Entry(
        "clock --gradients 12",
        "--policies asgd,hardsync --paces fixed --workers 2 --gradients 4 --rounds 1",
        *(560, 9),
    ),
    "cluster": Entry(
        "cluster --rounds 3 --seconds 1",
        "--clients 8 --many 50 --seconds 0.1 --rounds 2",
        *(110, 6),
    ),
    "simulation": Entry(
        "simulation --rounds 21",
        "--dataset digits --hidden 20 --rounds 3 --iterations 50",
        *(40, 3),
        alone=True,
    ),
}
"""The benchmarks by the names of their files, in the order in which they run."""


class Clock:
    """Estimates the time left: the expected seconds, times the pace so far.

    Parameters
    ----------
    expected
        Seconds, by name, in order.
    """

    def __init__(self, expected: Mapping[str, float]) -> None:
        self._left = dict(expected)
        self._said = self._taken = 0.0

    def done(self, name: str, seconds: float, *, whole: bool) -> None:
        """Note that one has ended; one that failed half way does not correct the pace."""
        said = self._left.pop(name)
        if whole:
            self._said += said
            self._taken += seconds

    def left(self, gone: float = 0.0) -> float:
        """Return the seconds left, ``gone`` seconds after the present one began."""
        pace = self._taken / self._said if self._said else 1.0
        now, *others = self._left.values() or [0.0]
        return max(pace * now - gone, 0.0) + pace * sum(others)


@contextmanager
def _running(words: Sequence[str], entry: Entry) -> Iterator[ChildProcess]:
    """Run a benchmark; it and its processes have ended when the block is left."""
    environment = dict(os.environ)
    path = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), path]))
    if entry.alone:
        environment |= ONE_THREAD
    with _one_core() if entry.alone else nullcontext():
        process = ChildProcess(
            "the benchmark", words, environment=environment, lines="both", grace=_GRACE
        )
    with process:
        yield process


@contextmanager
def _one_core() -> Iterator[None]:
    """Bind this thread to one core: a child that it starts inherits that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def run(
    names: Sequence[str], folder: Path, console: Console, *, quick: bool = False
) -> dict[str, str]:
    """Run benchmarks; return the errors of those that failed, by name.

    Parameters
    ----------
    names
        Of `ENTRIES`.
    folder
        Where their files go.
    console
        Told how far it is, and how much time is left.
    quick
        Whether in a hurry.
    """
    expected = {name: ENTRIES[name].hurried if quick else ENTRIES[name].seconds for name in names}
    clock, failed = Clock(expected), dict[str, str]()
    for number, name in enumerate(names, 1):
        entry, begin = ENTRIES[name], time.monotonic()
        benchmark, *flags = entry.command(quick=quick)
        head = f"{number}/{len(names)} {name}"
        _log(console, f"{head}: {shlex.join([benchmark, *flags])}")
        words = command(f"benchmarks.{benchmark}", *flags, "--out", str(folder))
        words.insert(1, "-P")  # the folder that it is run in is none of its packages
        said: deque[str] = deque(maxlen=_LAST)
        with console.status(head) as status, _running(words, entry) as process:
            for line in filter(None, map(str.strip, process.lines())):
                said.append(line)
                left = formatting.seconds(clock.left(time.monotonic() - begin))
                status.update(f"{head}, about {left} left: {line[:60]}")
            code = process.popen.wait()
        seconds = time.monotonic() - begin
        clock.done(name, seconds, whole=not code)
        if code:
            failed[name] = f"exit status {code}: " + " / ".join(said)
        how = "FAILED after" if code else "took"
        left = f", about {formatting.seconds(clock.left())} left" if number < len(names) else ""
        _log(console, f"{head} {how} {formatting.seconds(seconds)}{left}")
    return failed


def _log(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when one failed, 2 when an option is wrong."""
    parser = argparse.ArgumentParser("aiops bench all", description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a look: four minutes on two cores")
    parser.add_argument(
        "--out", type=Path, default=FOLDER, metavar="FOLDER", help=f"default {FOLDER}"
    )
    parser.add_argument("--only", metavar="NAMES", help=f"of these: {', '.join(ENTRIES)}")
    chosen = parser.parse_args(argv)
    console = Console(stderr=True)
    with report.ended_in_order(parser):
        names, absent = _there(_names(chosen.only))
        for name, why in absent.items():
            _log(console, f"skipping {name}: {why}")
        report.ask_for_plots(chosen.out / "plot.png")
        report.make(chosen.out)
        failed = run(names, chosen.out, console, quick=chosen.quick)
    print(f"{len(names) - len(failed)} of {len(names)} benchmarks ran; their files are in", end=" ")
    print(chosen.out)
    if failed:
        print("failed:", *(f"{name}: {why}" for name, why in failed.items()), sep="\n  ")
        raise SystemExit(1)


def _there(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Return those that can run here, and why the others cannot."""
    reasons = {name: ENTRIES[name].missing() for name in names}
    absent = {name: reason for name, reason in reasons.items() if reason}
    return [name for name in names if name not in absent], absent


def _names(only: str | None) -> list[str]:
    """Return which are to run, in the suite's order."""
    if only is None:
        return list(ENTRIES)
    wanted = [name.strip() for name in only.split(",")]
    for name in wanted:
        if name not in ENTRIES:
            raise UsageError(f"no benchmark is called {name!r}; {nearest(name, ENTRIES)}")
    return [name for name in ENTRIES if name in wanted]


if __name__ == "__main__":
    main()
