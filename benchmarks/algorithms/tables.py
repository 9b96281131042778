"""The results as tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from aiops.common import formatting
from benchmarks import report
from benchmarks.algorithms import accuracy, idle, straggler

Row = Mapping[str, Any]

MEANINGS = """\
accuracy   on the test set, of the parameters after the last sample; mean over the seeds
spread     the lowest and the highest of them
seconds    from the word to go until the last worker has finished
updates    of the server
staleness  mean over all gradients that were used, in updates
idle       the workers' time that they waited for the server (for `average`: for the lock)
wasted     gradients that the policy did not use
bytes      on the wire, all workers, both ways"""


def grouped(runs: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of each case, by its name: plain policies first, each part sorted."""
    order = sorted(runs, key=lambda row: (bool(row["variant"]), row["policy"], row["variant"]))
    found: dict[str, list[Row]] = {}
    for row in order:
        found.setdefault(f"{row['policy']} {row['variant']}".rstrip(), []).append(row)
    return found


def mean(rows: Sequence[Row], name: str) -> float | None:
    """Return the mean of a figure over runs, or None where they have none."""
    values = [row[name] for row in rows if row[name] is not None]
    return statistics.fmean(values) if values else None


def all_of(content: Mapping[str, Any]) -> Iterator[tuple[str, Table]]:
    """Yield a heading and a table per part that there are results of."""
    task = content["task"]
    if content["runs"]:
        yield (
            f"Accuracy: {task['dataset']}, perceptron with {task['hidden']} hidden units,"
            f" {task['workers']} workers, mini-batches of {task['batch_size']},"
            f" {task['epochs']:g} epochs of samples in all; goal {accuracy.GOAL:.0%}",
            of_accuracy(content["runs"]),
        )
    if content["idle"]:
        yield (
            f"Idle: a gradient takes {1000 * idle.PACE:g} ms, a merge about {idle.MERGE} gradients;"
            f" goal for no-delay with τ_max 8: under {idle.GOAL:.0%}",
            of_idle(content["idle"]),
        )
    if content["straggler"]:
        yield (
            f"Straggler: a gradient takes {1000 * straggler.PACE:g} ms, then one worker's takes"
            f" {straggler.SLOWER} times as long: steps per second of the others;"
            f" goal for {', '.join(straggler.GOAL_FOR)}: {straggler.GOAL:.0%} kept",
            of_straggler(content["straggler"]),
        )


def of_accuracy(runs: Sequence[Row]) -> Table:
    """Make the table of the first part."""
    columns = (
        *("policy", "settings", "seeds", "accuracy", "spread", "goal", "seconds", "updates"),
        *("staleness", "idle", "wasted", "bytes"),
    )
    plain: list[list[str]] = []
    variants: list[list[str]] = []
    for name, group in grouped(runs).items():
        (variants if group[0]["variant"] else plain).append([name, *_accuracy_row(group)])
    between: list[list[str]] = [[]] if plain and variants else []
    return report.table("", columns, [*plain, *between, *variants], text_columns=2)


def _accuracy_row(runs: Sequence[Row]) -> list[str]:
    reached = [row["accuracy"] for row in runs]
    average = statistics.fmean(reached)
    staleness, seconds = mean(runs, "staleness"), statistics.fmean(row["seconds"] for row in runs)
    return [
        " ".join(f"{name}={value}" for name, value in runs[0]["settings"].items()) or "defaults",
        str(len(runs)),
        f"{average:.2%}",
        f"{min(reached):.2%}-{max(reached):.2%}",
        "ok" if average >= accuracy.GOAL else "below",
        f"{seconds:.1f}",
        f"{mean(runs, 'updates') or 0:,.0f}",
        "-" if staleness is None else f"{staleness:.2f}",
        f"{mean(runs, 'idle') or 0:.1%}",
        f"{mean(runs, 'wasted') or 0:,.0f}",
        formatting.nbytes(int(mean(runs, "bytes") or 0)),
    ]


def of_idle(rows: Sequence[Row]) -> Table:
    """Make the table of the second part."""
    columns = ("policy", "", "merge (gradients)", "idle", "speed (1: no waits)")
    return report.table(
        "",
        columns,
        [
            [
                *(row["policy"], row["variant"], f"{row['merge']:.2f}"),
                *(f"{row['idle']:.2%}", f"{row['speed']:.3f}"),
            ]
            for row in rows
        ],
        text_columns=2,
    )


def of_straggler(rows: Sequence[Row]) -> Table:
    """Make the table of the third part."""
    columns = ("policy", "all healthy", "beside the straggler", "kept")
    return report.table(
        "",
        columns,
        [
            [row["policy"], f"{row['healthy']:.1f}", f"{row['beside']:.1f}", f"{row['kept']:.1%}"]
            for row in sorted(rows, key=lambda row: -row["kept"])
        ],
    )
