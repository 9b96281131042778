"""The overlap benchmark: training over a slow link, with exchanges beside computing and without.

    python -m benchmarks.overlap [--rate 20Mbit/s] [--delay 0.005] [--workers 2] [--compute 0.05]
                                 [--hidden 512] [--overlaps 0,1,2] [--seconds 30] [--rounds 3]
                                 [--json out.json] [--plot out.png]

Workers train a perceptron on the digits with asgd for a stated time, each behind a link of its own
of a stated rate and delay each way (`aiops.lab.slow_link`). They compute real gradients, and then
sleep until a mini-batch has taken ``--compute``, so that all of them have the time of a processor.
Measured are the steps per second of one worker, their staleness, and the loss and error on the test
set of the server's parameters at the end. Beside them stands *hardsync*, with the same gradients
per step of all workers and the learning rate times their number.

Two figures are computed, not measured: the seconds of a step that waits for nothing but the slowest
of computing, sending and receiving (``limit``), and those of synchronous training with a ring
all-reduce among the workers, which sends 2 (N - 1) / N models each way after computing (``ring``),
as PyTorch's DDP does where backward and communication do not overlap.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import aiops
from aiops.bandwidth.units import parse_rate
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.lab.slow_link import SlowLink
from aiops.lab.workloads import MLP, batches, load
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.serving import serving

_SYNC = "hardsync"


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    rate: Annotated[str, "of a worker's link, each way"] = "20Mbit/s"
    delay: Annotated[float, "seconds, each way"] = 0.005
    workers: int = 2
    compute: Annotated[float, "seconds of a mini-batch"] = 0.05
    hidden: Annotated[int, "units of the perceptron"] = 512
    lr: Annotated[float, "learning rate of asgd"] = 0.05
    overlaps: Annotated[tuple[int, ...], "exchanges under way"] = (0, 1, 2)
    seconds: Annotated[float, "of training, each"] = 30.0
    rounds: int = 3


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: steps, staleness and loss by overlap.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    if min(options.workers, options.hidden, options.rounds) < 1 or 0 not in options.overlaps:
        raise UsageError("numbers are positive, and 0 is among --overlaps: it is compared with")
    bytes_per_second = parse_rate("--rate", options.rate)
    about, model = machine(), MLP((64, options.hidden, 10))
    nbytes = sum(array.nbytes for array in model.init(seed=0).values())
    cases = [_SYNC, *map(str, options.overlaps)]
    rounds: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    for number in range(options.rounds):
        for case in cases:
            found = _train(options, model, case, number)
            rounds[case].append(found)
            log(
                f"round {number + 1}, {_name(case)}: {found['per_second']:.2f} steps/s, staleness"
                f" {found['staleness']:.1f}, loss {found['loss']:.3f}"
            )
    way = nbytes / bytes_per_second
    share = 2 * (options.workers - 1) / options.workers
    computed = {
        "limit": 1 / max(options.compute, way),
        "ring": 1 / (options.compute + share * (way + options.delay)),
    }
    found_rows = {
        case: {
            "rounds": each,
            **{key: report.spread([one[key] for one in each]) for key in each[0]},
            "times_off": report.spread(
                [
                    one["per_second"] / off["per_second"]
                    for one, off in zip(each, rounds["0"], strict=True)
                ]
            ),
        }
        for case, each in rounds.items()
    }
    measured = {"bytes": nbytes, "cases": found_rows, "computed": computed}
    return record("benchmark", "overlap", options, measured, about)


def _name(case: str) -> str:
    return case if case == _SYNC else "asgd" if case == "0" else f"asgd, overlap={case}"


def _train(options: Options, model: MLP, case: str, seed: int) -> dict[str, float]:
    """Train for a while; return what came of it."""
    data, sync = load("digits"), case == _SYNC
    lr = options.lr * (options.workers if sync else 1)
    flags = ["--lr", str(lr), "--workers", str(options.workers)]
    initial = model.init(seed=seed)
    with ExitStack() as stack:
        url, _pid = stack.enter_context(serving(_SYNC if sync else "asgd", *flags))
        link = SlowLink(url, rate=options.rate, delay=options.delay, each=True)
        stack.enter_context(link)
        overlap = 0 if sync else int(case)
        joined = [
            stack.enter_context(aiops.Worker(link.url, initial, overlap=overlap, timeout=600))
            for _ in range(options.workers)
        ]
        until = time.perf_counter() + options.seconds

        def train(number: int) -> int:
            worker = joined[number]
            for x, y in batches(data, 16, seed=1000 * seed + number):
                begin = time.perf_counter()
                if begin >= until:
                    break
                _loss, gradients = model.gradients(worker.params, x, y)
                time.sleep(max(0.0, options.compute - (time.perf_counter() - begin)))
                worker.step(gradients)
            worker.close(flush=not sync)  # the others may have ended before this barrier
            return worker.steps

        with ThreadPoolExecutor(options.workers) as pool:
            steps = list(pool.map(train, range(options.workers)))
        with aiops.Client(url) as server:
            params, stats = server.fetch(), server.stats()
    loss, accuracy = model.evaluate(params, data.test_x, data.test_y)
    return {
        "per_second": sum(steps) / options.workers / options.seconds,
        "staleness": float(stats["mean_staleness"]),
        "loss": loss,
        "error": 1 - accuracy,
    }


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    options, rows = result["options"], []
    for case, found in result["cases"].items():
        times = found["times_off"]
        rows.append(
            [
                _name(case),
                f"{found['per_second']['median']:.2f}",
                f"{times['median']:.2f} ({times['min']:.2f}-{times['max']:.2f})",
                f"{found['staleness']['median']:.1f}",
                f"{found['loss']['median']:.3f}",
                f"{found['error']['median']:.1%}",
            ]
        )
    computed = result["computed"]
    rows.append([])
    rows.append(["computed: a ring all-reduce", f"{computed['ring']:.2f}", "", "", "", ""])
    rows.append(["computed: the limit of overlap", f"{computed['limit']:.2f}", "", "", "", ""])
    title = (
        f"{plots.crowd(options['workers'])}, {result['bytes'] / 1e3:,.0f} kB, each behind"
        f" {options['rate']} and {1e3 * options['delay']:g} ms each way,"
        f" {1e3 * options['compute']:g} ms a mini-batch, {options['seconds']:g} s of training;"
        f" medians over {options['rounds']} rounds"
    )
    columns = ("", "steps/s of a worker", "x off", "staleness", "test loss", "test error")
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's."""
    for case, found in result["cases"].items():
        if case == "0":
            yield Cell.of(_name(case), "steps/s", found["per_second"])
        else:
            yield Cell.of(_name(case), "steps/s", found["times_off"], beside=_name("0"))


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw steps per second, and the test loss after the same time."""
    cases = list(result["cases"])
    names, numbers = [_name(case) for case in cases], itertools.count()
    where = {case: next(numbers) for case in cases}
    panels = []
    for key, title, unit in (
        ("per_second", "throughput", "steps/s of a worker"),
        ("loss", f"after {result['options']['seconds']:g} s", "test loss"),
    ):
        found = {where[case]: each[key] for case, each in result["cases"].items()}
        panels.append(Panel(title, unit, "", [plots.rows("measured", found)], ticks=names))
    rate = result["options"]["rate"]
    return Figure(f"Exchanges beside computing, over {rate}", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
