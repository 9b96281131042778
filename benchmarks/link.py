"""The link benchmark: exchanges over a slow link, raw and coded.

    python -m benchmarks.link [--rates 1Gbit/s,100Mbit/s] [--codecs raw,fp16,int8,onebit,topk:0.01]
                              [--mib 16] [--rounds 5] [--seconds 2]
                              [--json out.json] [--plot out.png]

One server process and one worker, with a proxy between them that carries a stated rate
each way (`aiops.lab.slow_link`). A cycle pushes a gradient, has the server apply it, and brings the
parameters after it; gradients and increments travel in the codec. Every round takes the codecs in
turn, so that what the machine does meanwhile meets all; ratios are to raw in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np

import aiops
from aiops.bandwidth.units import parse_rate
from aiops.codecs.choice import CodecChoice
from aiops.errors import UsageError
from aiops.lab.figures import Figure, Panel
from aiops.lab.run_record import machine, record
from aiops.lab.slow_link import SlowLink
from benchmarks import plots, report
from benchmarks.compare import Cell
from benchmarks.serving import serving

_ACROSS = 1024  # elements of a row of the model's matrix


@dataclass(frozen=True)
class Options:
    """The options of the benchmark."""

    rates: Annotated[tuple[str, ...], "of the link"] = ("1Gbit/s", "100Mbit/s")
    codecs: Annotated[tuple[str, ...], "codecs"] = ("raw", "fp16", "int8", "onebit", "topk:0.01")
    mib: Annotated[int, "size of the model"] = 16
    rounds: int = 5
    seconds: Annotated[float, "per codec"] = 2.0


def run(options: Options, log: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure, and return the report: exchanges per second and bytes, by rate and codec.

    Raises
    ------
    UsageError
        When an option makes no sense.
    """
    if min(options.mib, options.rounds) < 1 or "raw" not in options.codecs:
        raise UsageError("numbers are positive, and raw is among the codecs: it is compared with")
    CodecChoice.of(options.codecs)
    for rate in options.rates:
        parse_rate("--rates", rate)
    about = machine()
    found: dict[str, Any] = {}
    for rate in options.rates:
        rounds = []
        for number in range(options.rounds):
            rounds.append({codec: _cycle(options, rate, codec) for codec in options.codecs})
            shown = ", ".join(
                f"{codec} {row['per_second']:.1f}" for codec, row in rounds[-1].items()
            )
            log(f"{rate}, round {number + 1}: {shown} exchanges/s")
        found[rate] = {
            codec: {
                "rounds": [row[codec] for row in rounds],
                "per_second": report.spread([row[codec]["per_second"] for row in rounds]),
                "times_raw": report.spread(
                    [row[codec]["per_second"] / row["raw"]["per_second"] for row in rounds]
                ),
            }
            for codec in options.codecs
        }
    return record("benchmark", "link", options, {"rates": found}, about)


def _cycle(options: Options, rate: str, codec: str) -> dict[str, float]:
    """Exchange for a while in one codec."""
    flags = () if codec == "raw" else ("--push-codec", codec, "--fetch-codec", codec)
    rows = options.mib * (1 << 20) // 4 // _ACROSS
    rng = np.random.default_rng(0)
    gradient = {"w": rng.standard_normal((rows, _ACROSS)).astype(np.float32)}
    with ExitStack() as stack:
        url, _pid = stack.enter_context(serving("asgd", *flags))
        link = stack.enter_context(SlowLink(url, rate=rate))
        # The model is brought past the link: it is the exchanges that are measured.
        first = {"w": np.zeros((rows, _ACROSS), np.float32)}
        with aiops.Worker(url, first):
            pass
        worker = stack.enter_context(aiops.Worker(link.url, first, timeout=600))
        for _ in range(2):
            worker.step(gradient)
        before, count = sum(worker.traffic), 0
        begin = now = time.perf_counter()
        while now - begin < options.seconds:
            worker.step(gradient)
            count, now = count + 1, time.perf_counter()
        nbytes = (sum(worker.traffic) - before) / count
    return {"per_second": count / (now - begin), "bytes": nbytes}


def table(result: Mapping[str, Any]) -> Any:
    """Make the table of a report."""
    rows = []
    for rate, codecs in result["rates"].items():
        for codec, figures in codecs.items():
            nbytes = figures["rounds"][0]["bytes"]
            times = figures["times_raw"]
            rows.append(
                [
                    rate,
                    codec,
                    f"{nbytes / 1e6:,.2f} MB",
                    f"{figures['per_second']['median']:,.1f}",
                    f"{times['median']:.1f}",
                    f"{times['min']:.1f}-{times['max']:.1f}",
                ]
            )
    options = result["options"]
    title = (
        f"One worker, {options['mib']} MiB of float32, exchanges over a slow link; medians over"
        f" {options['rounds']} rounds"
    )
    columns = ("link", "codec, both ways", "bytes", "exchanges/s", "x raw", "min-max")
    return report.table(title, columns, rows)


def cells(result: Mapping[str, Any]) -> Iterator[Cell]:
    """Yield what can be compared with another run's: exchanges in a codec beside raw ones."""
    for rate, codecs in result["rates"].items():
        for codec, figures in codecs.items():
            where = f"{rate}, {codec}"
            if codec == "raw":
                yield Cell.of(where, "exchanges/s", figures["per_second"])
            else:
                yield Cell.of(where, "exchanges/s", figures["times_raw"], beside="raw")


def figure(result: Mapping[str, Any]) -> Figure:
    """Draw exchanges per second by codec, and beside raw, a colour for each rate."""
    codecs = list(result["options"]["codecs"])
    panels = []
    for key, title, unit in (
        ("per_second", "throughput", "exchanges/s"),
        ("times_raw", "beside raw", "times raw's throughput"),
    ):
        lines = [
            plots.rows(rate, {codecs.index(name): each[key] for name, each in found.items()})
            for rate, found in result["rates"].items()
        ]
        panels.append(Panel(title, unit, "", lines, log="x", ticks=codecs))
    size = f"{result['options']['mib']} MiB"
    return Figure(f"One worker behind a slow link, {size} of float32", panels, len(panels))


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when an option is wrong."""
    report.command(Options(), run, table, argv, drawn=figure)


if __name__ == "__main__":
    main()
