"""The files of an experiment: curves, summary, an archive of its runs, and a figure."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from aiops.common.jsonable import plain
from aiops.lab import drawing
from aiops.lab.experiments import run_archive
from aiops.lab.experiments.experiment import Experiment, Findings, Scale
from aiops.lab.experiments.runs import FinishedRun, RunFolder, Runs, unique
from aiops.lab.run_record import record, write_text


def finished(experiment: Experiment, scale: Scale, runs: Runs) -> list[FinishedRun]:
    """Return the runs of an experiment that are finished, those of pools included."""
    return runs.of(experiment.cases(scale, runs))


def save(
    experiment: Experiment,
    scale: Scale,
    folder: RunFolder,
    findings: Findings,
    command: str,
    *,
    draw: bool = True,
) -> list[Path]:
    """Write everything, the figure only if wanted; return the files.

    Raises
    ------
    UsageError
        When matplotlib is missing, after the rest has been written; or a file cannot be.
    """
    runs = finished(experiment, scale, folder.runs)
    curves, table = folder.path / "curves.csv", folder.path / "summary.json"
    write_text(curves, csv_of(experiment, runs))
    write_text(
        table, json.dumps(summary(experiment, scale, folder, findings, command), indent=1) + "\n"
    )
    archive = folder.path / run_archive.NAME
    folder.archive(archive, (run.case.key for run in runs))
    if not draw:
        return [table, curves, archive]
    figure = experiment.draw(scale, folder.runs)
    return [table, curves, archive, *drawing.save(figure, folder.path / "figure")]


def summary(
    experiment: Experiment, scale: Scale, folder: RunFolder, findings: Findings, command: str
) -> dict[str, Any]:
    """Return the whole of it as JSON has it."""
    cases = list(experiment.cases(scale, folder.runs))
    runs = folder.runs.of(cases)
    failed = [case for case in unique(cases) if case.key in folder.runs.failed]
    found: dict[str, Any] = {
        "title": experiment.title,
        "source": experiment.source,
        "claim": experiment.claim,
        "command": command,
        "complete": len(runs) == len(cases),
        "verdicts": [{"word": v.word, **asdict(v)} for v in findings.verdicts],
        "table": findings.table,
        "numbers": findings.numbers,
        "scale": scale,
        "seeds": sorted({run.case.seed for run in runs if run.case.role == "reported"}),
        "versions": _versions(runs, folder),
        "runs": [_run(run) for run in runs],
        "failed": [{"name": case.name, "why": folder.runs.failed[case.key]} for case in failed],
    }
    results = {key: plain(value) for key, value in found.items()}
    about = folder.machines[runs[0].case.key] if runs else {}
    return record("experiment", experiment.name, scale.knobs, results, about)


def _versions(runs: Sequence[FinishedRun], folder: RunFolder) -> list[Mapping[str, Any]]:
    """Return the versions with which the runs were made: one entry, if nothing came between."""
    found: list[Mapping[str, Any]] = []
    for run in runs:
        made = folder.versions[run.case.key]
        if made not in found:
            found.append(made)
    return found


def _run(run: FinishedRun) -> dict[str, Any]:
    case, last = run.case, run.last
    return {
        "panel": case.panel,
        "curve": case.curve,
        "seed": case.seed,
        "role": case.role,
        "key": case.key,
        "digest": run.result["digest"],
        "diverged": run.result.get("diverged"),
        "error": last.get("error"),
        "tail_error": run.tail() if "error" in last else None,
        "seconds": run.result.get("seconds"),
        "settings": case.settings,
    }


def csv_of(experiment: Experiment, runs: Sequence[FinishedRun]) -> str:
    """Return all samples of all runs, a line for each."""
    lines = list(_lines(experiment, runs))
    columns = dict.fromkeys(name for line in lines for name in line)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def _lines(experiment: Experiment, runs: Sequence[FinishedRun]) -> Iterator[dict[str, Any]]:
    for run in runs:
        case = run.case
        named = {"panel": case.panel, "curve": case.curve, "seed": case.seed, "role": case.role}
        for sample in experiment.samples(run):
            yield {**named, "key": case.key, **sample}
