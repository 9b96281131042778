"""The DDP benchmark: a small GPT by ``aiops run`` with nothing set, and by DDP with tuned AdamW.

    python -m benchmarks.ddp [--workers 2] [--steps 600] [--rates 0.001,0.003,0.01]
                             [--schedules constant,cosine] [--rounds 1]
                             [--json out.json] [--plot out.png]

Both train ``examples/gpt.py`` (0.84 million parameters, mini-batches of 8 windows of 128 bytes) for
the same number of mini-batches in all, in processes of one thread. aiops is ``aiops run``: a server
with its defaults, in a process of its own. DDP is ``torchrun``: AdamW with β₂ = 0.95, gradients
clipped at 1, a rate that rises over the first tenth of the steps and then stays, or falls as a
cosine; all rates are tried both ways. Measured are the cost of text that is held out, and the
seconds from a process's start to its last step.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from aiops.errors import UsageError, nearest
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from benchmarks import plots, report
from benchmarks.compare import Cell

_OURS = "aiops, nothing set"
_ROOT = Path(__file__).parents[1]
_ENDED = re.compile(r"rank (\d+): ([\d.]+|nan) nats per byte of what is held out, (\d+) s")
_SCHEDULES = ("constant", "cosine")
_PATIENCE = 3600.0  # seconds for a run


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    workers: int = 2
    steps: Annotated[int, "mini-batches in all"] = 600
    rates: Annotated[tuple[float, ...], "learning rates of AdamW"] = (0.001, 0.003, 0.01)
    schedules: Annotated[tuple[str, ...], "of the rates, after their rise"] = _SCHEDULES
    rounds: int = 1

    def check(self) -> None:
        """Raise UsageError when an option makes no sense."""
        if min(self.workers, self.rounds, *self.rates) <= 0 or self.steps < self.workers:
            raise UsageError("numbers and rates are positive, and each worker takes a step")
        for schedule in self.schedules:
            if schedule not in _SCHEDULES:
                known = nearest(schedule, _SCHEDULES)
                raise UsageError(f"no schedule is called {schedule!r}; {known}")
        if importlib.util.find_spec("torch") is None:
            raise UsageError("this needs PyTorch: pip install 'aiops-ps[torch]'")


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: a cell for aiops, and one for each way of DDP.

    Raises
    ------
    UsageError
        When an option makes no sense.
    RuntimeError
        When a run failed; with its last lines.
    """
    options.check()
    about = machine(("numpy", "torch"))
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name, _command in _ways(options)}
    for number in range(options.rounds):
        for name, command in _ways(options):
            rounds[name].append(found := _trained(command, options.workers))
            log(f"round {number + 1}, {name}: {found['cost']:.3f} nats in {found['seconds']:.0f} s")
    cells = [
        {
            "cell": name,
            "rounds": each,
            **{key: report.spread([one[key] for one in each]) for key in each[0]},
        }
        for name, each in rounds.items()
    ]
    return record("benchmark", "ddp", options, {"cells": cells}, about)


def _ways(options: Options) -> Iterator[tuple[str, list[str]]]:
    """Yield the ways to train, each with its command."""
    steps = ["--steps", str(options.steps // options.workers)]
    aiops = [sys.executable, "-m", "aiops", "run", "--workers", str(options.workers)]
    yield _OURS, [*aiops, str(_ROOT / "examples" / "gpt.py"), *steps]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", str(options.workers), str(_ROOT / "benchmarks/ddp_worker.py")]
    for rate in options.rates:
        for schedule in options.schedules:
            words = ["--lr", str(rate), *(["--cosine"] if schedule == "cosine" else [])]
            yield f"DDP, AdamW {rate:g}, {schedule}", [*torchrun, *steps, *words]


def _trained(command: Sequence[str], workers: int) -> dict[str, float]:
    """Return the cost and the seconds of the rank that ends last."""
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=_PATIENCE,
        check=False,
    )
    ended = _ENDED.findall(done.stdout)
    if done.returncode or len(ended) != workers:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-20:])
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{last}")
    _rank, cost, seconds = max(ended, key=lambda each: float(each[2]))
    return {"cost": float(cost), "seconds": float(seconds)}


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    options = result["options"]
    rows = [
        [
            cell["cell"],
            f"{cell['cost']['median']:.3f}",
            f"{cell['cost']['min']:.3f}-{cell['cost']['max']:.3f}",
            f"{cell['seconds']['median']:.0f}",
        ]
        for cell in result["cells"]
    ]
    title = (
        f"examples/gpt.py, {options['steps']} mini-batches in all by"
        f" {plots.crowd(options['workers'])}; medians over rounds ({options['rounds']})"
    )
    return report.table(title, ("by", "nats", "min-max", "seconds"), rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for cell in result["cells"]:
        yield Cell.of(cell["cell"], "nats", cell["cost"], less=True)


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw the costs."""
    found = list(enumerate(result["cells"]))
    line = plots.rows("measured", {row: cell["cost"] for row, cell in found})
    panel = Panel("held out", "nats", "", [line], ticks=[cell["cell"] for _row, cell in found])
    return Figure("A small GPT, the same mini-batches", [panel], 1)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
