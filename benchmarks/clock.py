"""The clock benchmark: the virtual clock's wall time beside that of real runs.

    python -m benchmarks.clock [--policies asgd,hardsync,...] [--workers 1,2,4] [--rate 20Mbit/s]
                               [--kib 256] [--delay 0.005] [--compute 0.1] [--gradients 20]
                               [--rounds 3] [--json out.json] [--plot out.png]

Each case is run for real (a server process, workers in threads, all connections through one link
of a stated rate and delay, `aiops.lab.slow_link`) and in virtual time (`aiops.testing.simulate`),
told the same and nothing else. Real workers do not compute but sleep, for the very times that the
virtual ones draw, so that two cores are enough for any number of them. Time is counted from when
all workers are connected until the last one has said goodbye. Nothing is fitted.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

import aiops
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.lab.slow_link import DEPTH, SlowLink
from aiops.serving.config import Config
from aiops.testing import (
    Cluster,
    ClusterResult,
    Computing,
    Deadweight,
    Fixed,
    LogNormal,
    StarTopology,
    Straggler,
    simulate,
)
from benchmarks import plots, report
from benchmarks.serving import serving

_PATIENCE = 600.0  # seconds that a worker waits for an answer


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    policies: Annotated[tuple[str, ...], "policies"] = (
        "asgd",
        "softsync",
        "hardsync",
        "ssp",
        "easgd",
    )
    paces: Annotated[tuple[str, ...], "paces of the workers"] = ("fixed", "log-normal", "straggler")
    workers: Annotated[tuple[int, ...], "numbers of workers"] = (1, 2, 4)
    rate: Annotated[str, "of the link, each way"] = "20Mbit/s"
    kib: Annotated[int, "size of the model"] = 256
    delay: Annotated[float, "seconds, each way"] = 0.005
    compute: Annotated[float, "seconds of a mini-batch"] = 0.1
    gradients: Annotated[int, "per worker"] = 20
    rounds: int = 3
    seed: int = 0


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: seconds of every real run beside the prediction.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    if options.rounds < 1:
        raise UsageError("measure at least one round")
    about = machine()
    cases = list(itertools.product(options.policies, options.paces, options.workers))
    predicted = {case: simulate(_cluster(options, *case)) for case in cases}
    measured: dict[Any, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for case in cases:
            found = _real(options, _cluster(options, *case))
            measured[case].append(found)
            outcome = predicted[case]
            log(
                f"round {number + 1}, {' '.join(map(str, case))}: {found['seconds']:.2f} s,"
                f" predicted {outcome.seconds:.2f}; idle {found['idle']:.0%},"
                f" predicted {outcome.idle:.0%}"
            )
    rows = [_row(case, measured[case], predicted[case]) for case in cases]
    return record("benchmark", "clock", options, {"cases": rows}, about)


def _row(case: Any, rounds: list[dict[str, float]], outcome: ClusterResult) -> dict[str, Any]:
    policy, pace, workers = case
    seconds = report.spread([found["seconds"] for found in rounds])
    return {
        "policy": policy,
        "pace": pace,
        "workers": workers,
        "rounds": rounds,
        "seconds": seconds,
        "predicted": outcome.seconds,
        "error": outcome.seconds / seconds["median"] - 1,
        "idle": report.spread([found["idle"] for found in rounds]),
        "predicted_idle": outcome.idle,
        "staleness": report.spread([found["staleness"] for found in rounds]),
        "predicted_staleness": outcome.mean_staleness,
    }


def _cluster(options: Options, policy: str, pace: str, workers: int) -> Cluster:
    """Describe a case."""
    paces: Mapping[str, Computing] = {
        "fixed": Fixed(options.compute),
        "log-normal": LogNormal(options.compute, 0.5),
        "straggler": Straggler(Fixed(options.compute), times=4.0),
    }
    if pace not in paces:
        raise UsageError(f"no pace is called {pace!r}: there are {', '.join(paces)}")
    return Cluster(
        server=Config(policy=policy),
        workers=workers,
        workload=Deadweight(options.kib << 10),
        computing=paces[pace],
        links=StarTopology(server=options.rate, latency=options.delay, burst=DEPTH),
        gradients=options.gradients * workers,
        patience=_PATIENCE,
        seed=options.seed,
    )


def _real(options: Options, cluster: Cluster) -> dict[str, float]:
    """Run a case in real time."""
    flags = ("--workers", str(cluster.workers))
    tickets = _Tickets(cluster)
    with ExitStack() as stack:
        url, _pid = stack.enter_context(serving(cluster.server.policy, *flags))
        link = stack.enter_context(SlowLink(url, rate=options.rate, delay=options.delay))
        pool = stack.enter_context(ThreadPoolExecutor(cluster.workers))
        labours = list(
            pool.map(lambda number: tickets.train(link.url, number), range(cluster.workers))
        )
        seconds = time.perf_counter() - tickets.began
        with aiops.Client(url) as observer:
            staleness = observer.stats()["mean_staleness"]
    present, idle = map(sum, zip(*labours, strict=True))
    return {"seconds": seconds, "idle": idle / present, "staleness": staleness}


class _Tickets:
    """The state that the workers of one run share: mini-batches left, and when they began."""

    def __init__(self, cluster: Cluster) -> None:
        assert cluster.gradients is not None
        self._cluster, self._left = cluster, cluster.gradients
        self._lock = threading.Lock()
        self._all = threading.Barrier(cluster.workers, self._begin)
        self.began = 0.0

    def _begin(self) -> None:
        self.began = time.perf_counter()

    def _take(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left >= 0

    def train(self, url: str, number: int) -> tuple[float, float]:
        """Be a worker; return the seconds it took part, and those of them that it was idle."""
        cluster = self._cluster
        pace = cluster.computing.pace(number, cluster.seed)
        gradient = cluster.workload.gradient(number, cluster.seed)

        def compute(params: Any) -> Mapping[str, np.ndarray[Any, Any]]:
            time.sleep(pace(time.perf_counter() - self.began))
            return gradient(params)

        initial = cluster.workload.initial(cluster.seed)
        with aiops.Worker(url, initial, name=f"worker-{number}", timeout=_PATIENCE) as worker:
            self._all.wait(_PATIENCE)
            idle, began = worker.idle_seconds, time.perf_counter()
            while self._take():
                worker.step(compute)
            seconds = time.perf_counter() - began
            idle = worker.idle_seconds - idle
        return seconds, idle


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for row in result["cases"]:
        seconds = row["seconds"]
        rows.append(
            [
                row["policy"],
                row["pace"],
                str(row["workers"]),
                f"{seconds['median']:.2f}",
                f"{seconds['min']:.2f}-{seconds['max']:.2f}",
                f"{row['predicted']:.2f}",
                f"{row['error']:+.1%}",
                f"{row['idle']['median']:.1%}",
                f"{row['predicted_idle']:.1%}",
                f"{row['staleness']['median']:.2f}",
                f"{row['predicted_staleness']:.2f}",
            ]
        )
    options = result["options"]
    title = (
        f"{options['kib']} KiB of float32 through one link of {options['rate']} each way, delay"
        f" {1000 * options['delay']:g} ms; {1000 * options['compute']:g} ms a mini-batch,"
        f" {options['gradients']} a worker; medians over {options['rounds']} rounds"
    )
    columns = (
        *("policy", "compute times", "workers", "seconds", "min-max", "predicted", "error"),
        *("idle", "predicted", "staleness", "predicted"),
    )
    return report.table(title, columns, rows, text_columns=2)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw how far predictions are from each round: of wall times, and of idle shares."""
    cases, options = result["cases"], result["options"]
    policies = list(options["policies"])

    def error(case: Mapping[str, Any], found: Mapping[str, float]) -> float:
        return 100 * (float(case["predicted"]) / found["seconds"] - 1)

    def idle(case: Mapping[str, Any], found: Mapping[str, float]) -> float:
        return 100 * (float(case["predicted_idle"]) - found["idle"])

    panels = []
    for title, unit, off in (
        ("wall time", "% of the measured", error),
        ("idle share", "points from the measured", idle),
    ):
        most = max(abs(off(case, found)) for case in cases for found in case["rounds"])
        edge = 1.05 * max(most, 1.0)
        for pace in options["paces"]:
            lines = []
            for workers in options["workers"]:
                spreads = {
                    policies.index(case["policy"]): report.spread(
                        [off(case, found) for found in case["rounds"]]
                    )
                    for case in cases
                    if (case["pace"], case["workers"]) == (pace, workers)
                }
                lines.append(plots.rows(plots.crowd(workers), spreads))
            panels.append(
                Panel(f"{title}, {pace}", unit, "", lines, bottom=-edge, top=edge, ticks=policies)
            )
    title = "How far the virtual clock's predictions are from real runs, by compute times"
    return Figure(title, panels, len(options["paces"]))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
