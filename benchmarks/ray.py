"""The Ray benchmark: nodes of a cluster killed and added, and the cost of a step under Ray.

    python -m benchmarks.ray [--workers 16] [--nodes 4] [--parts kills,standby,steps] [--rounds 3]

**kills**: a job of ``--workers`` on a cluster of ``--nodes`` on this machine. A node with workers
is killed, then the server's; each time another is added when training has gone on. Every worker
takes down each acknowledged step. The figures are the longest time without any step of any worker
after each kill, the time from the second kill until all workers step again, and the acknowledged
steps that the model has lost.

**standby**: the same, and the server has a standby.

**steps**: a worker's steps per second under Ray beside those under ``aiops run``, of the same loop,
with no Ray on the machine; both take turns.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from rich.table import Table

from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.ray_loops import acknowledged, count_steps, steps_per_second
from benchmarks.sizes import KIB, MIB, format_size, parse_size, short_size

KILLS = {"kills": "", "standby": ", with a standby"}
"""The parts in which nodes are killed, and how their rows differ."""

PARTS = (*KILLS, "steps")

GAPS = {
    "worker_gap": "no step after a worker's node was killed",
    "server_gap": "no step after the server's node was killed",
    "whole": "server's node killed to steps of all workers",
}
"""What is taken down of the kills, in seconds."""

_ROOT = Path(__file__).resolve().parents[1]
_PATIENCE = 180.0  # seconds until something must have happened
_GONE = 1.0  # seconds after which all that was on a node that is killed has ended
_LONGEST = 5.0  # seconds after which training is to go on
_MOST = 1.05  # times the steps under Ray that `aiops run` may have


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    parts: Annotated[tuple[str, ...], "of the benchmark"] = PARTS
    workers: Annotated[int, "of the job whose nodes are killed"] = 16
    nodes: Annotated[int, "of its cluster"] = 4
    pause: Annotated[float, "seconds between two of its steps"] = 0.01
    sizes: Annotated[tuple[int, ...], "of the model for steps", parse_size] = (4 * KIB, MIB)
    step_workers: Annotated[int, "of the job whose steps are counted"] = 2
    seconds: Annotated[float, "for which steps are counted"] = 3.0
    rounds: int = 3

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        for name in self.parts:
            if name not in PARTS:
                raise UsageError(f"no part is {name!r}; {nearest(name, PARTS)}")
        if min(self.rounds, self.seconds, self.workers, self.step_workers) <= 0:
            raise UsageError("rounds, seconds and workers are positive")
        if self.nodes < 2:
            raise UsageError("there are at least 2 nodes: two are killed")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report.

    Raises
    ------
    UsageError
        When an option makes no sense, or Ray is missing.
    """
    options.check()
    try:
        import ray  # noqa: F401
    except ImportError:
        raise UsageError("this needs Ray: pip install 'aiops-ps[ray]'") from None
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_ROOT), path]))
    about, found = machine(), dict[str, Any]()
    rounds_of: dict[str, list[dict[str, float]]] = {p: [] for p in KILLS if p in options.parts}
    for number in range(options.rounds):
        for part, rounds in rounds_of.items():
            log(f"{part}, round {number + 1} of {options.rounds}")
            with tempfile.TemporaryDirectory() as folder:
                rounds.append(_kill(options, Path(folder), part == "standby"))
    for part, rounds in rounds_of.items():
        found[part] = {
            "rounds": rounds,
            **{name: report.spread([one[name] for one in rounds]) for name in GAPS},
            "lost": max(one["lost"] for one in rounds),
        }
    if "steps" in options.parts:
        found["cells"] = list(_steps(options, log))
    return record("benchmark", "ray", options, found, about)


# ---------------------------------------------------------------- kills


def _kill(options: Options, folder: Path, standby: bool) -> dict[str, float]:
    import ray

    import aiops.ray
    from benchmarks.ray_nodes import ray_nodes

    cpus = -(-(options.workers + 1 + standby) // (options.nodes - 1))
    with ray_nodes(options.nodes, cpus, folder) as nodes, ThreadPoolExecutor() as thread:
        running = thread.submit(
            lambda: aiops.ray.train(
                count_steps,
                policy="asgd",
                lr=1.0,
                min_workers=1,
                max_workers=options.workers,
                config={"folder": str(folder), "pause": options.pause},
                state=folder / "state",
                standby=standby,
                name="kills",
                detached=True,
                run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
            )
        )
        try:
            times = _disturb(options, folder, nodes, running)
        finally:
            (folder / "stop").touch()
        result = running.result(_PATIENCE)
        server = aiops.ray.server("kills")
        with server.client() as client:
            model = client.fetch()["w"]
        server.stop()
    if result.error is not None:
        raise RuntimeError(f"workers were given up: {result.error}")
    counts = np.array([len(acknowledged(folder, rank)) for rank in range(options.workers)])
    return {**times, "steps": int(counts.sum()), "lost": float(np.maximum(counts - model, 0).sum())}


def _disturb(options: Options, folder: Path, nodes: Any, running: Future[Any]) -> dict[str, float]:
    """Kill two nodes and add two; return the seconds of `GAPS`."""
    import aiops.ray

    def since(moment: float) -> list[float]:
        """The last step of each worker that has taken one since then."""
        last = (acknowledged(folder, rank)[-1:] for rank in range(options.workers))
        return [float(each[0]) for each in last if len(each) and each[0] > moment]

    def step(moment: float, count: int = options.workers) -> float:
        """Wait until some workers have taken a step after a moment; return when that was."""
        deadline = time.monotonic() + _PATIENCE
        while len(since(moment)) < count:
            if time.monotonic() > deadline or running.done():
                raise RuntimeError(f"{len(since(moment))} of {options.workers} workers step")
            time.sleep(0.02)
        return time.time()

    step(time.time())
    server = aiops.ray.server("kills")
    home, taken = server.node, {access.node for access in server.accesses}
    other = next(node for node in nodes.nodes if node not in taken)
    first = time.time()
    nodes.kill(other)
    step(first + _GONE, 1)
    nodes.add()
    step(time.time())
    deadline = time.monotonic() + _PATIENCE
    while server.is_pair and not server.has_standby:
        if time.monotonic() > deadline:
            raise RuntimeError("the server has no standby")
        time.sleep(0.1)
    second = time.time()
    nodes.kill(home)
    step(second + _GONE, 1)
    nodes.add()
    whole = step(second + _GONE)
    return {
        "worker_gap": _gap(options, folder, first, second),
        "server_gap": _gap(options, folder, second, whole),
        "whole": whole - second,
    }


def _gap(options: Options, folder: Path, begin: float, end: float) -> float:
    """Return the longest time between two moments without a step of any worker."""
    times = np.concatenate([acknowledged(folder, rank) for rank in range(options.workers)])
    within = np.sort(times[(times > begin) & (times < end)])
    return float(np.diff(np.concatenate([[begin], within, [end]])).max())


# ---------------------------------------------------------------- steps


def _steps(options: Options, log: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    rates = {size: {"ray": list[float](), "run": list[float]()} for size in options.sizes}
    for number in range(options.rounds):
        log(f"steps, round {number + 1} of {options.rounds}")
        for size in options.sizes:
            rates[size]["run"].append(_under_run(options, size))
        with tempfile.TemporaryDirectory() as folder:
            for size, rate in _under_ray(options, Path(folder)).items():
                rates[size]["ray"].append(rate)
    for size, both in rates.items():
        ratios = [run / ray for run, ray in zip(both["run"], both["ray"], strict=True)]
        yield {
            "cell": format_size(size),
            "size": size,
            **{name: report.spread(values) for name, values in both.items()},
            "cost": report.spread(ratios),
            "rounds": [{"run": r, "ray": y} for r, y in zip(both["run"], both["ray"], strict=True)],
        }


def _under_run(options: Options, size: int) -> float:
    words = ["run", "-n", str(options.step_workers), "--policy", "asgd", "--worker-threads", "1"]
    words += ["-m", "benchmarks.ray_loops", str(size), str(options.seconds)]
    done = subprocess.run(
        [sys.executable, "-m", "aiops", *words],
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=True,
    )
    lines = [line.partition("] ")[2] for line in done.stdout.splitlines() if line.startswith("[")]
    rates = [float(line) for line in lines if line.replace(".", "", 1).isdigit()]
    if len(rates) != options.step_workers:
        raise RuntimeError(f"not every worker told its steps: {done.stdout}{done.stderr}")
    return sum(rates) / len(rates)


def _rate_reported(config: Mapping[str, Any]) -> None:
    import aiops.ray

    aiops.ray.report({"rate": steps_per_second(config)})


def _under_ray(options: Options, folder: Path) -> dict[int, float]:
    import ray

    import aiops.ray
    from benchmarks.ray_nodes import ray_nodes

    found = {}
    with ray_nodes(1, options.step_workers + 2, folder):
        for size in options.sizes:
            result = aiops.ray.train(
                _rate_reported,
                policy="asgd",
                num_workers=options.step_workers,
                server_resources={"CPU": 2},  # `aiops run` gives its server all processors
                config={"nbytes": size, "seconds": options.seconds},
                run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
            )
            found[size] = float(result.metrics_dataframe["rate"].mean())
    return found


# ---------------------------------------------------------------- the report


def table(result: Mapping[str, Any]) -> Table:
    """Make the table of a report."""
    rows: list[list[str]] = []
    for part in [part for part in KILLS if part in result]:
        kills, how = result[part], KILLS[part]
        rows += [[name + how, _spread(kills[key], "s")] for key, name in GAPS.items()]
        rows += [["acknowledged steps that were lost" + how, f"{kills['lost']:.0f}"]]
    for cell in result.get("cells", ()):
        rows += [
            [],
            [f"{cell['cell']}: steps/s of a worker, aiops run", _spread(cell["run"])],
            [f"{cell['cell']}: under Ray", _spread(cell["ray"])],
            [f"{cell['cell']}: a step under Ray ÷ under aiops run", _spread(cell["cost"])],
        ]
    options = result["options"]
    title = (
        f"{options['workers']} workers on {options['nodes']} nodes, of which two are killed;"
        f" medians of {options['rounds']} (least-most)"
    )
    return report.table(title, ("", "median"), rows)


def _spread(spread: Mapping[str, float], unit: str = "") -> str:
    median, least, most = (f"{spread[key]:,.2f}" for key in ("median", "min", "max"))
    return f"{median} {unit} ({least}-{most})".replace("  ", " ")


def notes(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield notes on the goals, for below the table."""
    yield f"training is to go on within {_LONGEST:g} s of each kill, and nothing is to be lost"
    yield f"a step under Ray may take {_MOST:g} times that under aiops run"


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for part in [part for part in KILLS if part in result]:
        for key, name in GAPS.items():
            yield Cell.of(part, f"{name}, s", result[part][key], less=True)
    for cell in result.get("cells", ()):
        yield Cell.of(cell["cell"], "step under Ray ÷ aiops run", cell["cost"], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the time after each kill, and the steps per second by the model's size."""
    panels = []
    killed = [part for part in KILLS if part in result]
    if killed:
        gaps = [
            plots.rows(part, {row: result[part][key] for row, key in enumerate(GAPS)})
            for part in killed
        ]
        panels.append(Panel("", "seconds", "", gaps, bottom=0, ticks=list(GAPS.values())))
    mine = result.get("cells", [])
    lines = [
        plots.rounds("aiops run", mine, "run", 1.0),
        plots.rounds("Ray", mine, "ray", 1.0),
    ]
    ticks = [short_size(cell["size"]) for cell in mine]
    if mine:
        panels.append(Panel("a worker's steps", "model", "steps/s", lines, "y", ticks=ticks))
    return Figure("Under Ray, and under aiops run", panels, 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure, notes=notes)


if __name__ == "__main__":
    main()
