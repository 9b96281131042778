"""``aiops cluster``: a training run of many workers over given links, in virtual time."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from aiops.cli import tables
from aiops.cli.flags import (
    Assign,
    BatchSize,
    DatasetName,
    FetchCodec,
    Gate,
    Hidden,
    Json,
    Lr,
    Policy,
    PushCodec,
    Seed,
)
from aiops.cli.long_run import INTERRUPTED, interrupts, progress_bar
from aiops.common import formatting
from aiops.common.jsonable import plain
from aiops.errors import UsageError

if TYPE_CHECKING:
    from aiops.sim.cluster.compute_time import Computing
    from aiops.sim.cluster.result import ClusterResult
    from aiops.sim.cluster.spec import Cluster, ClusterEvent
    from aiops.sim.cluster.workload import Workload

_PROGRESS_EVERY = 0.1  # seconds between two updates of the progress bar

Budget = Annotated[str | None, typer.Option("--bandwidth-budget", help="2MB/s, all together.")]
Workers = Annotated[int, typer.Option(help="Number of workers (the papers' λ).")]
Compute = Annotated[float, typer.Option(help="Seconds that a mini-batch takes (the median).")]
Sigma = Annotated[float, typer.Option(help="Spread of its logarithm; 0: always the same.")]
Slow = Annotated[list[str] | None, typer.Option(help="WORKER:TIMES: it takes TIMES as long.")]
Diurnal = Annotated[str | None, typer.Option(help="PERIOD:DEPTH: slower by day, in seconds.")]
Link = Annotated[str | None, typer.Option(help="Each worker's link: 1Gbit/s.")]
ServerLink = Annotated[str | None, typer.Option(help="The server's link, which all share.")]
Latency = Annotated[float, typer.Option(help="Delay in seconds, each way.")]
Jitter = Annotated[float, typer.Option(help="Random extra delay, up to these seconds.")]
Overlap = Annotated[int, typer.Option(help="Exchanges under way while a worker computes.")]
Apply = Annotated[float, typer.Option(help="Seconds of an update on the server.")]
Model = Annotated[str | None, typer.Option(help="A model of this size that learns nothing: 64MiB.")]
Gradients = Annotated[int | None, typer.Option(help="Mini-batches in all; default 100 a worker.")]
Seconds = Annotated[float | None, typer.Option(help="Virtual seconds, if they end earlier.")]
CutAt = Annotated[
    list[str] | None, typer.Option("--cut", help="SECONDS:WORKER: its connection is reset.")
]
SilenceAt = Annotated[
    list[str] | None,
    typer.Option("--silence", help="SECONDS:WORKER:DURATION: nothing comes from it or reaches it."),
]
KillAt = Annotated[
    list[str] | None, typer.Option("--kill", help="SECONDS:WORKER: its machine fails.")
]
JoinAt = Annotated[list[str] | None, typer.Option("--join", help="SECONDS:NUMBER of new workers.")]


def cluster(
    policy: Policy = "fasgd",
    lr: Lr = None,
    assign: Assign = None,
    gate: Gate = "",
    push_codec: PushCodec = None,
    fetch_codec: FetchCodec = None,
    budget: Budget = None,
    workers: Workers = 4,
    compute: Compute = 0.1,
    sigma: Sigma = 0.0,
    slow: Slow = None,
    diurnal: Diurnal = None,
    link: Link = None,
    server_link: ServerLink = None,
    latency: Latency = 0.0,
    jitter: Jitter = 0.0,
    overlap: Overlap = 0,
    apply: Apply = 0.0,
    model: Model = None,
    dataset: DatasetName = "digits",
    hidden: Hidden = 32,
    batch_size: BatchSize = 16,
    gradients: Gradients = None,
    seconds: Seconds = None,
    cut: CutAt = None,
    silence: SilenceAt = None,
    kill: KillAt = None,
    join: JoinAt = None,
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Simulate a cluster in virtual time: real server and workers, simulated machines and links.

    Prints the time of the run, the workers' idle time and staleness, and the accuracy. 64 workers
    on 1 Gbit/s are: --workers 64 --link 1Gbit/s --server-link 1Gbit/s --model 64MiB. Ctrl-C ends
    the run and prints its result so far; the exit status is then 130.
    """
    from aiops.serving.config import Config
    from aiops.sim.cluster.spec import Cluster, StarTopology

    server = Config(
        policy=policy,
        lr=lr,
        set=list(assign or ()),
        gate=gate,
        push_codec=list(push_codec or ()),
        fetch_codec=list(fetch_codec or ()),
        bandwidth_budget=budget,
        port=0,
    )
    schedule = _schedule(cut or (), silence or (), kill or (), join or ())
    most = workers + sum(max(0, getattr(event, "workers", 0)) for event in schedule)
    outcome = _carry_out(
        Cluster(
            server=server,
            workers=workers,
            workload=_workload(model, dataset, hidden, batch_size),
            computing=_computing(compute, sigma, slow or (), diurnal, most),
            links=StarTopology(worker=link, server=server_link, latency=latency, jitter=jitter),
            overlap=overlap,
            apply_seconds=apply,
            schedule=schedule,
            gradients=100 * workers if gradients is None and seconds is None else gradients,
            seconds=seconds,
            seed=seed,
        )
    )
    if as_json:
        print(json.dumps(_report(outcome), allow_nan=False))
    else:
        tables.console().print(_table(outcome))
    tables.warn(outcome.report["warnings"])
    raise typer.Exit(0 if outcome.complete else INTERRUPTED)


def _workload(model: str | None, dataset: str, hidden: int, batch_size: int) -> Workload:
    from aiops.bandwidth.units import parse_size
    from aiops.lab.workloads import PerceptronWorkload
    from aiops.sim.cluster.workload import Deadweight

    if model is not None:
        return Deadweight(parse_size("--model", model))
    return PerceptronWorkload(dataset, (hidden,), batch_size)


def _computing(
    seconds: float, sigma: float, slow: Sequence[str], diurnal: str | None, workers: int
) -> Computing:
    """Return the times of mini-batches; ``workers``: with those that join."""
    from aiops.sim.cluster.compute_time import Diurnal, Fixed, LogNormal, Straggler

    found: Computing = LogNormal(seconds, sigma) if sigma else Fixed(seconds)
    for worker, times in _read("--slow", slow, WORKER=int, TIMES=float):
        if worker >= workers:
            raise UsageError(f"--slow {worker}:{times:g}: there are workers 0 to {workers - 1}")
        found = Straggler(found, times, (worker,))
    for cycle in _read("--diurnal", [diurnal] if diurnal else [], PERIOD=float, DEPTH=float):
        found = Diurnal(found, *cycle)
    return found


def _schedule(
    cut: Sequence[str], silence: Sequence[str], kill: Sequence[str], join: Sequence[str]
) -> tuple[ClusterEvent, ...]:
    from aiops.sim.cluster.spec import Cut, Join, Kill, Silence

    return (
        *(Cut(*e) for e in _read("--cut", cut, SECONDS=float, WORKER=int)),
        *(
            Silence(*e)
            for e in _read("--silence", silence, SECONDS=float, WORKER=int, DURATION=float)
        ),
        *(Kill(*e) for e in _read("--kill", kill, SECONDS=float, WORKER=int)),
        *(Join(*e) for e in _read("--join", join, SECONDS=float, NUMBER=int)),
    )


def _read(flag: str, texts: Sequence[str], **fields: Callable[[str], Any]) -> Iterator[list[Any]]:
    """Yield the values of each text, which has a colon between its fields."""
    for text in texts:
        parts = text.split(":")
        try:
            yield [read(part) for read, part in zip(fields.values(), parts, strict=True)]
        except ValueError:
            raise UsageError(f"{flag} {text!r}: write {':'.join(fields)}") from None


def _carry_out(what: Cluster) -> ClusterResult:
    """Run it to its end, or until Ctrl-C; show its progress on stderr once it has begun."""
    from aiops.sim.cluster.run import simulate

    progress = progress_bar("{task.fields[done]:,} mini-batches")
    shown = progress.add_task("", total=1.0, done=0)
    stopped = threading.Event()
    shown_at = 0.0

    def on_progress(done: int, seconds: float) -> None:
        nonlocal shown_at
        now = time.monotonic()
        share = _share(what, done, seconds)
        if now - shown_at > _PROGRESS_EVERY or share >= 1:
            shown_at = now
            progress.start()
            progress.update(shown, completed=share, done=done)

    try:
        with interrupts(stopped.set):
            return simulate(what, on_progress, stopped.is_set)
    finally:
        if shown_at:
            progress.stop()


def _share(what: Cluster, done: int, seconds: float) -> float:
    """Return the finished share of the run: of mini-batches or of time, the larger."""
    shares = [done / what.gradients] if what.gradients else []
    shares += [seconds / what.seconds] if what.seconds else []
    return max(shares, default=0.0)


def _report(outcome: ClusterResult) -> dict[str, Any]:
    """Return the result as JSON values, without the parameters."""
    found = {field.name: getattr(outcome, field.name) for field in dataclasses.fields(outcome)}
    del found["params"]
    found["workers"] = [
        {**dataclasses.asdict(worker), "idle_share": worker.idle_share}
        for worker in outcome.workers
    ]
    found["samples"] = [dataclasses.asdict(sample) for sample in outcome.samples]
    found["staleness"] = {str(tau): count for tau, count in sorted(outcome.staleness.items())}
    found |= {"idle": outcome.idle, "mean_staleness": outcome.mean_staleness}
    described: dict[str, Any] = plain(found)
    return described


def _table(outcome: ClusterResult) -> Table:
    computed = sum(worker.compute for worker in outcome.workers)
    nbytes = sum(worker.bytes_in + worker.bytes_out for worker in outcome.workers)
    rate = outcome.gradients / outcome.seconds if outcome.seconds else 0.0
    cells = {
        "time": f"{formatting.seconds(outcome.seconds)} (virtual), {outcome.gradients:,}"
        f" mini-batches, {rate:,.1f} a second",
        "speed-up": f"{computed / outcome.seconds if outcome.seconds else 0:.1f} times one worker"
        f" that never waits; {len(outcome.workers)} workers",
        "idle": f"{formatting.percent(outcome.idle)} of the workers' time; "
        + _span([worker.idle_share for worker in outcome.workers]),
        "staleness": f"{outcome.mean_staleness:.2f} on average,"
        f" at most {max(outcome.staleness, default=0)}",
        "moved": f"{formatting.nbytes(nbytes)} in {outcome.messages:,} messages",
        "digest": outcome.digest,
    }
    if outcome.samples:
        last = outcome.samples[-1]
        cells["learnt"] = f"accuracy {formatting.percent(last.accuracy)}, loss {last.loss:.4f}"
    return tables.facts(cells)


def _span(shares: Sequence[float]) -> str:
    """Return the smallest and the largest share."""
    if not shares:
        return "no worker took part"
    return f"{formatting.percent(min(shares))} to {formatting.percent(max(shares))} of each"
