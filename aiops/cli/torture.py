"""``aiops torture``: kill processes, damage disks, be a hostile peer, and count what is lost."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from aiops.cli import tables
from aiops.cli.flags import Json
from aiops.cli.long_run import INTERRUPTED, interrupts, processors, progress_bar
from aiops.common import formatting
from aiops.errors import UsageError, nearest

if TYPE_CHECKING:
    from aiops.lab.torture.trial_series import TrialFindings, TrialSeries

_COUNTS = (
    "partitions_by_kind",
    *("outcomes", "answers", "acts", "faults", "trials_by_policy", "trials_by_acks"),
    *("kills_by_policy", "kills_by_transport", "kills_by_acks", "kills_by_layout", "ended_at"),
)
"""The keys of a report that count by a name."""

app = typer.Typer(
    help="Kill servers and workers, cut networks, damage disks, send hostile frames; count losses.",
    no_args_is_help=True,
)

Count = Annotated[int | None, typer.Option(min=1, help="Begin no trial after this many kills.")]
Seconds = Annotated[
    float | None, typer.Option(help="Nor after this many seconds; default 60, if no --count.")
]
Seed = Annotated[int, typer.Option(help="Of the first trial; each next one has the next.")]
Jobs = Annotated[int, typer.Option(help="Trials at the same time; 0: one per processor.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this policy; may be repeated.")]
Report = Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JSON report.")]
Keep = Annotated[
    Path | None, typer.Option(metavar="DIR", help="Put the files of failed trials here.")
]
Resume = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Continue the run of this report.")
]
States = Annotated[int | None, typer.Option(min=1, help="Begin no trial after this many.")]
Failed = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append plans that fail to this file.")
]


def _add_killing(what: str, text: str) -> None:
    """Add the command of trials that kill processes."""

    @app.command(what, help=text)
    def killing(
        count: Count = None,
        seconds: Seconds = None,
        seed: Seed = 0,
        jobs: Jobs = 0,
        only: Only = None,
        report: Report = None,
        keep: Keep = None,
        resume: Resume = None,
        as_json: Json = False,
    ) -> None:
        bounds = count, _seconds(count, seconds), seed, processors(jobs)
        _torture(_killing(what, bounds, only, keep, resume), report, as_json)


_add_killing(
    "workers",
    "Kill workers, and check that each acknowledged push counts once, any other at most once.",
)
_add_killing(
    "servers",
    "Kill servers with --state: workers ride it out, no push is lost, the parameters are equal.",
)
_add_killing(
    "endings",
    "End servers by SIGTERM under load: status 0 in 10 s, no push is lost, workers go on.",
)


def _add_simulated(what: str, text: str) -> None:
    """Add the command of trials that are simulated, each from a seed."""

    @app.command(what, help=text)
    def simulated(
        count: States = None,
        seconds: Seconds = None,
        seed: Seed = 0,
        jobs: Jobs = 0,
        only: Only = None,
        report: Report = None,
        failed: Failed = None,
        resume: Resume = None,
        as_json: Json = False,
    ) -> None:
        from aiops.lab.torture.seed_campaign import KINDS, SeedCampaign

        bounds = count, _seconds(count, seconds), seed, processors(jobs)
        names = _chosen(only, KINDS[what].names)
        campaign = SeedCampaign(what, *bounds, names, failed=failed)
        if resume is not None:
            campaign.resume(resume)
        _torture(campaign, report, as_json)


_add_simulated(
    "states",
    "Damage states of simulated servers (power, torn sectors, flips): read right, or refused.",
)
_add_simulated(
    "clusters",
    "Simulate clusters with faults: no push is lost unless told, and all goes on afterwards.",
)
_add_simulated(
    "sessions",
    "Send a simulated server hostile frames: it answers with an error or closes, and serves on.",
)
_add_simulated(
    "lines",
    "Change what a follower says to its lead, and a primary to its standby: both go on afterwards.",
)
_add_simulated(
    "frames",
    "The same with mutated frames, handed to a server in this process: many thousand a second.",
)
_add_simulated(
    "mailboxes",
    "Write what no worker would in mailboxes that a server reads: no other worker notices.",
)


@app.command(
    "data", help="Kill workers and servers amid epochs: each example is in the model once an epoch."
)
def data(
    kills: Annotated[int, typer.Option(min=0, help="Workers to kill.")] = 100,
    server_kills: Annotated[int, typer.Option(min=0, help="Servers to kill.")] = 0,
    workers: Annotated[int, typer.Option(min=1, help="Workers at a time.")] = 4,
    dataset: Annotated[
        str, typer.Option("--data", help="mnist, cifar10, digits; or a number of random examples.")
    ] = "mnist",
    epochs: Annotated[int, typer.Option(min=1, help="Epochs.")] = 3,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a mini-batch.")] = 32,
    acks: Annotated[
        str | None,
        typer.Option(
            help="The promise of an acknowledgement; default written, with a standby replicated.",
            show_default=False,
        ),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="A standby takes the place of each server killed.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the moments, and of the order.")] = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Run one trial, print what it found, and exit with status 1 unless it is right."""
    from aiops.lab.torture.data_trial import DataTrial, DataTrialPlan
    from aiops.lab.torture.spawner import Spawner

    numbers = kills, server_kills, workers, dataset, epochs, batch_size
    acks = acks or ("replicated" if standby else "written")
    if standby and acks != "replicated":
        raise UsageError(f"with a standby --acks is replicated, not {acks}: leave it out")
    plan = DataTrialPlan(*numbers, acks, seed, standby=standby)
    with tempfile.TemporaryDirectory(prefix="torture-data-") as folder, Spawner() as spawner:
        spawner.rehearse()
        found = DataTrial(plan, Path(folder), spawner).run()
    cells = {
        "killed": f"{found.killed:,} workers, {found.servers_killed:,} servers"
        + ", whose standby was promoted" * standby,
        "examples": f"{found.examples:,}, in {plan.epochs:,} epochs",
        "in the model once": f"{sum(found.once):,}",
        "missing": f"{sum(found.missing):,}",
        "more than once": f"{sum(found.twice):,}",
        "handed out again": f"{found.returned:,}",
        "accuracy": f"{found.accuracy:.2%}",
        "time": formatting.seconds(found.seconds),
    }
    _end(found.report(), cells, report, as_json, right=found.right)


@app.command(
    "values", help="Push NaN, infinite and huge values: refused whole, or the model stays finite."
)
def values(
    count: Annotated[int, typer.Option(min=1, help="Pushes.")] = 10_000,
    seed: Seed = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Run trials on one server or several, print what they found, exit with status 1 if wrong."""
    from aiops.lab.torture.bad_values import BadValues

    found, errors = BadValues(seed), Console(stderr=True, highlight=False)
    bar = progress_bar("{task.description}", errors)
    task = bar.add_task("pushes", total=count)
    with bar:
        found.run(count, lambda cases: bar.update(task, completed=cases))
    outcomes = dict(found.outcomes.most_common())
    record = {"what": "values", "pushes": found.cases, "seed": seed, "outcomes": outcomes}
    cells = {"pushes": f"{found.cases:,}"}
    cells |= {name: f"{number:,}" for name, number in outcomes.items()}
    cells["wrong"] = "; ".join(found.wrong[:5]) or "none"
    _end({**record, "wrong": found.wrong}, cells, report, as_json, right=not found.wrong)


@app.command(
    "handshakes", help="Strangers at a server of TLS and client certificates: none gets a byte."
)
def handshakes(
    count: Annotated[int, typer.Option(min=1, help="Wrong handshakes.")] = 1000,
    seed: Seed = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Have strangers connect while a worker trains; exit with status 1 unless they get nothing."""
    from aiops.lab.torture.handshakes import run

    with tempfile.TemporaryDirectory(prefix="torture-handshakes-") as folder:
        found = run(count, seed, Path(folder))
    cells = {
        "wrong handshakes": f"{found.counts.total():,} of {len(found.counts)} kinds",
        "decrypted bytes": f"{found.application:,}",
        "with the model in them": f"{found.leaked:,}",
        "longest answer": f"{found.longest:,} bytes",
        "honest worker": f"{found.steps:,} steps, {found.slowest:.3f} s at most",
        "faults": "; ".join(found.faults[:5]) or "none",
        "time": formatting.seconds(found.seconds),
    }
    _end(found.report(), cells, report, as_json, right=found.right)


@app.command(
    "bits", help="Flip bits of messages with checksums and of a state's files: none is accepted."
)
def bits(
    count: Annotated[int, typer.Option(min=1, help="Flips.")] = 100_000,
    seed: Seed = 0,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Flip bits, print what became of them, and exit with status 1 if one was accepted."""
    from aiops.lab.torture.flipped_bits import FlippedBits

    flips, errors = FlippedBits(seed), Console(stderr=True, highlight=False)
    bar = progress_bar("{task.description}", errors)
    task = bar.add_task("flips", total=count)
    with bar:
        found = flips.run(count, lambda done: bar.update(task, completed=done))
    record = {"what": "bits", "seed": seed, **found.report()}
    cells = {"flips": f"{count:,}", "flips/s": f"{record['flips_per_second']:,}"}
    cells |= {name: f"{number:,}" for name, number in record["outcomes"].items()}
    cells["changed what is done"] = "; ".join(found.accepted[:5]) or "none"
    _end(record, cells, report, as_json, right=not found.accepted)


@app.command(
    "fuzz", help="Fuzz the parsers, guided by coverage (Atheris): a documented error or a value."
)
def fuzz(
    corpus: Annotated[
        Path, typer.Option(metavar="DIR", help="Inputs by target; what reaches further is added.")
    ],
    seconds: Annotated[int, typer.Option(min=1, help="For each target.")] = 30,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this target; may be repeated.")
    ] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Fuzz one target after the other, and exit with status 1 if one was broken."""
    from aiops.lab.torture.fuzz_targets import TARGETS
    from aiops.lab.torture.fuzzing import fuzz as fuzz_one

    found = [fuzz_one(target, corpus, seconds) for target in _chosen(only, TARGETS)]
    cells = {each.target: f"{each.runs:,} inputs, {each.coverage:,} edges" for each in found}
    cells |= {f"finding in {each.target}": each.finding for each in found if each.finding}
    record = {"what": "fuzz", "seconds": seconds, "targets": [asdict(each) for each in found]}
    _end(record, cells, report, as_json, right=not any(each.finding for each in found))


@app.command(
    "partitions", help="Part workers from their server: noticed, healed, each push counts once."
)
def partitions(
    count: Annotated[
        int | None, typer.Option(min=1, help="Begin no trial after this many partitions.")
    ] = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Networks at the same time.")] = 4,
    only: Annotated[
        list[str] | None, typer.Option(help="Only this way to cut; may be repeated.")
    ] = None,
    report: Report = None,
    as_json: Json = False,
) -> None:
    """Cut networks of namespaces, which takes Linux and root; most of the time it waits."""
    from aiops.lab.torture.partitions import PartitionCampaign
    from aiops.lab.torture.routed_network import CUTS

    bounds = count, _seconds(count, seconds), seed, jobs
    _torture(PartitionCampaign("partitions", *bounds, _chosen(only, CUTS)), report, as_json)


def _end(
    record: Mapping[str, Any],
    cells: Mapping[str, str],
    report: Path | None,
    as_json: bool,
    *,
    right: bool,
) -> None:
    """Write and print the findings of one trial, and exit with status 1 unless they are right."""
    text = json.dumps(record, indent=None if as_json else 2)
    if report is not None:
        report.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    else:
        tables.console().print(tables.facts(cells))
    if not right:
        raise typer.Exit(1)


def _seconds(count: int | None, seconds: float | None) -> float | None:
    return 60.0 if count is None and seconds is None else seconds


def _killing(
    what: str,
    bounds: tuple[int | None, float | None, int, int],
    only: list[str] | None,
    keep: Path | None,
    resume: Path | None,
) -> TrialSeries[Any, Any]:
    """Return trials that kill processes."""
    from aiops.lab.torture.campaign import Campaign
    from aiops.lab.torture.plan import PROCESS_VARIANTS

    made = Campaign(what, *bounds, _chosen(only, PROCESS_VARIANTS), folder=keep)
    if resume is not None:
        made.resume(resume)
    return made


def _chosen(only: list[str] | None, known: Collection[str]) -> tuple[str, ...]:
    """Return the variants of ``--only``; default: all that are known."""
    for name in only or ():
        if name not in known:
            raise UsageError(f"--only {name}: there is none here; {nearest(name, known)}")
    return tuple(only or known)


def _torture(campaign: TrialSeries[Any, Any], report: Path | None, as_json: bool) -> None:
    """Run trials, print what they found, and exit with status 1 if it was anything."""
    errors = Console(stderr=True, highlight=False)
    bar = progress_bar("{task.description}", errors)
    task = bar.add_task(campaign.progress, total=1.0)

    def on_trial(result: TrialFindings) -> None:
        bar.update(task, completed=campaign.done, description=campaign.progress)
        if result.wrong:
            errors.print(f"seed {result.plan.seed}: {result.wrong[0]}", style="red", markup=False)

    campaign.on_trial, campaign.file = on_trial, report
    with bar, interrupts(campaign.stop):
        campaign.run()
    if report is not None:
        campaign.save(report)
    found = campaign.report()
    if as_json:
        print(json.dumps(found))
    else:
        _show(campaign.what, found)
    if campaign.failures:
        raise typer.Exit(1)
    if campaign.stopped:
        raise typer.Exit(INTERRUPTED)


def _show(what: str, report: dict[str, Any]) -> None:
    console = tables.console()
    cells = _killed(what, report) if "kills" in report else _simulated(what, report)
    cells["seeds"] = " to ".join(f"{seed:,}" for seed in report["seeds"])
    cells["time"] = formatting.seconds(report["seconds"])
    cells["failures"] = f"{len(report['failures']):,}"
    for name, counts in report.items():
        if isinstance(counts, dict) and name in _COUNTS:
            listed = ", ".join(f"{key} {count:,}" for key, count in counts.items())
            cells[name.replace("_", " ")] = listed
    console.print(tables.facts(cells))
    for failure in report["failures"]:
        console.print(f"\nagain: {failure['again']}", style="red", soft_wrap=True)
        for text in failure["wrong"]:
            console.print(f"  {text}", soft_wrap=True, markup=False)


def _killed(what: str, report: dict[str, Any]) -> dict[str, str]:
    count = f" in {report['trials']:,} trials, {report['before_ready']:,} before they were ready"
    if what == "endings":
        killed = {"ended": f"{report['kills']:,} servers{count}"}
        killed["slowest"] = formatting.seconds(report["slowest_ending"])
    else:
        killed = {"killed": f"{report['kills']:,} {what}{count}"}
    return {
        **killed,
        "acknowledged": f"{report['acknowledged']:,} pushes",
        "lost": f"{report['told_lost']:,} of them, as their workers were told",
        "uncertain": f"{report['uncertain']:,} pushes, {report['uncertain_applied']:,} are applied",
    }


def _simulated(what: str, report: dict[str, Any]) -> dict[str, str]:
    from aiops.lab.torture.seed_campaign import unit_of

    tried, unit = f"{report['tried']:,}", unit_of(what)
    found = {"tried": f"{tried} {unit} in {report['trials']:,} trials"}
    if what in ("sessions", "frames", "mailboxes"):
        sent = f"{tried} {unit}, {report['bytes']:,} bytes"
        found["tried"] = f"{sent}, in {report['sessions']:,} sessions"
        if report.get("refused"):
            found["decoder"] = f"refuses {report['refused']:,} of them"
        if report["compiled"]:
            found["compiled code"] = f"answers {report['compiled']:,} of them"
        found["rate"] = f"{report['tried'] / max(report['seconds'], 0.1):,.0f} {unit}/s"
    if what == "partitions":
        found["acknowledged"] = f"{report['acknowledged']:,} pushes"
        for name in ("server_noticed", "worker_noticed", "healed"):
            found[name.replace("_", " ")] = _spread(report[f"{name}_seconds"])
    if what == "clusters":
        found["acknowledged"] = f"{report['acknowledged']:,} pushes"
        found["lost"] = f"{report['lost']:,} of them, as their workers were told"
    return found


def _spread(seconds: dict[str, float]) -> str:
    if not seconds["count"]:
        return "never"
    return (
        f"after {seconds['median']:g} s (median of {seconds['count']:,}), p99 {seconds['p99']:g} s,"
        f" at most {seconds['longest']:g} s"
    )
