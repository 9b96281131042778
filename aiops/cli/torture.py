"""``aiops torture``: kill real and simulated processes, damage disks, and count what is lost."""

from __future__ import annotations

import json
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
    from aiops.lab.torture.campaign import Campaign
    from aiops.lab.torture.trial import TrialResult

app = typer.Typer(
    help="Kill servers and workers, cut networks, damage disks, and count what is lost.",
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


@app.command()
def workers(
    count: Count = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    jobs: Jobs = 0,
    only: Only = None,
    report: Report = None,
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Kill workers, and check that each acknowledged push counts once, any other at most once."""
    _torture("workers", count, seconds, seed, jobs, only, report, keep, as_json=as_json)


@app.command()
def servers(
    count: Count = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    jobs: Jobs = 0,
    only: Only = None,
    report: Report = None,
    keep: Keep = None,
    as_json: Json = False,
) -> None:
    """Kill servers with --state: workers ride it out, no push is lost, the parameters are equal."""
    _torture("servers", count, seconds, seed, jobs, only, report, keep, as_json=as_json)


States = Annotated[int | None, typer.Option(min=1, help="Begin no trial after this many.")]
Seeds = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Append seeds that fail to this file.")
]


@app.command()
def states(
    count: States = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    only: Only = None,
    report: Report = None,
    seeds: Seeds = None,
    as_json: Json = False,
) -> None:
    """Damage states of simulated servers (power, torn sectors, flips): read right, or refused."""
    _simulate("states", count, seconds, seed, only, report, seeds, as_json=as_json)


@app.command()
def clusters(
    count: States = None,
    seconds: Seconds = None,
    seed: Seed = 0,
    only: Only = None,
    report: Report = None,
    seeds: Seeds = None,
    as_json: Json = False,
) -> None:
    """Simulate clusters with faults: no push is lost unless told, and all goes on afterwards."""
    _simulate("clusters", count, seconds, seed, only, report, seeds, as_json=as_json)


def _simulate(
    what: str,
    count: int | None,
    seconds: float | None,
    seed: int,
    only: list[str] | None,
    report: Path | None,
    seeds: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run simulated trials, print what they found, and exit with status 1 if it was anything."""
    from aiops.lab.torture.plan import VARIANTS
    from aiops.lab.torture.seed_campaign import SeedCampaign, SeedResult

    names = tuple(only or VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise UsageError(f"--only {name} is not a policy here; {nearest(name, VARIANTS)}")
    if count is None and seconds is None:
        seconds = 60.0
    campaign = SeedCampaign(what, count, seconds, seed, names, seeds)
    errors = Console(stderr=True, highlight=False)
    bar = progress_bar("{task.description}", errors)
    task = bar.add_task(f"no {what} yet", total=1.0)

    def on_trial(result: SeedResult) -> None:
        text = f"{campaign.tried:,} {what}, {len(campaign.failures)} failures"
        bar.update(task, completed=campaign.done, description=text)
        if result.wrong:
            errors.print(f"seed {result.plan.seed}: {result.wrong[0]}", style="red", markup=False)

    campaign.on_trial = on_trial
    with bar, interrupts(campaign.stop):
        campaign.run()
    if report is not None:
        campaign.save(report)
    found = campaign.report()
    if as_json:
        print(json.dumps(found))
    else:
        _show_simulated(what, found)
    if campaign.failures:
        raise typer.Exit(1)
    if campaign.stopped:
        raise typer.Exit(INTERRUPTED)


def _show_simulated(what: str, report: dict[str, Any]) -> None:
    console = Console(highlight=False)
    cells = {
        "tried": f"{report['tried']:,} {what} in {report['trials']:,} trials",
        "seeds": " to ".join(f"{seed:,}" for seed in report["seeds"]),
        "time": formatting.seconds(report["seconds"]),
        "failures": f"{len(report['failures']):,}",
    }
    if what == "clusters":
        cells["acknowledged"] = f"{report['acknowledged']:,} pushes"
        cells["lost"] = f"{report['lost']:,} of them, as their workers were told"
    for name in ("outcomes", "faults", "trials_by_policy", "trials_by_acks"):
        if name in report:
            counts = report[name].items()
            cells[name.replace("_", " ")] = ", ".join(f"{key} {count:,}" for key, count in counts)
    console.print(tables.facts(cells))
    _show_failures(console, report["failures"])


def _torture(
    what: str,
    count: int | None,
    seconds: float | None,
    seed: int,
    jobs: int,
    only: list[str] | None,
    report: Path | None,
    keep: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run trials, print what they found, and exit with status 1 if it was anything."""
    from aiops.lab.torture.campaign import Campaign
    from aiops.lab.torture.plan import VARIANTS

    names = tuple(only or VARIANTS)
    for name in names:
        if name not in VARIANTS:
            raise UsageError(f"--only {name} is not a policy here; {nearest(name, VARIANTS)}")
        if only and what == "workers" and not VARIANTS[name].additive:
            raise UsageError(f"--only {name}: a model under it is no sum of pushes to be counted")
    if count is None and seconds is None:
        seconds = 60.0
    campaign = Campaign(what, count, seconds, seed, processors(jobs), names, keep)
    with _Progress(campaign), interrupts(campaign.stop):
        campaign.run()
    if report is not None:
        campaign.save(report)
    if as_json:
        print(json.dumps(campaign.report()))
    else:
        _show(campaign)
    if campaign.failures:
        raise typer.Exit(1)
    if campaign.stopped:
        raise typer.Exit(INTERRUPTED)


class _Progress:
    """A progress bar on stderr, and above it the trials that failed."""

    def __init__(self, campaign: Campaign) -> None:
        self._campaign = campaign
        self._console = Console(stderr=True, highlight=False)
        self._bar = progress_bar("{task.description}", self._console)
        self._task = self._bar.add_task(f"no {campaign.what} killed yet", total=1.0)
        campaign.on_trial = self._trial

    def _trial(self, result: TrialResult) -> None:
        campaign = self._campaign
        text = f"{campaign.kills:,} {campaign.what} killed, {len(campaign.failures)} failures"
        self._bar.update(self._task, completed=campaign.done, description=text)
        if result.wrong:
            self._console.print(f"seed {result.plan.seed}: {result.wrong[0]}", style="red")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


def _show(campaign: Campaign) -> None:
    report = campaign.report()
    console = Console(highlight=False)
    cells = {
        "killed": f"{report['kills']:,} {campaign.what} in {report['trials']:,} trials,"
        f" {report['before_ready']:,} of them before they were ready",
        "acknowledged": f"{report['acknowledged']:,} pushes",
        "uncertain": f"{report['uncertain']:,} pushes, {report['uncertain_applied']:,} are applied",
        "seeds": " to ".join(f"{seed:,}" for seed in report["seeds"]),
        "time": formatting.seconds(report["seconds"]),
        "failures": f"{len(report['failures']):,}",
    }
    for name in ("policy", "transport", "acks"):
        kills = report[f"kills_by_{name}"]
        cells[f"by {name}"] = ", ".join(f"{key} {count:,}" for key, count in kills.items())
    console.print(tables.facts(cells))
    _show_failures(console, report["failures"])


def _show_failures(console: Console, failures: list[dict[str, Any]]) -> None:
    for failure in failures:
        console.print(f"\nagain: {failure['again']}", style="red", soft_wrap=True)
        for text in failure["wrong"]:
            console.print(f"  {text}", soft_wrap=True, markup=False)
