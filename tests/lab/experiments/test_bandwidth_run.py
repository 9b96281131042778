"""A real run: server, link and worker processes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.lab.experiments.bandwidth.case import BandwidthCase
from aiops.lab.experiments.bandwidth.networks import material
from aiops.lab.experiments.bandwidth.run import BandwidthOutcome, carry_out
from aiops.lab.processes import ProcessFailed
from tests.lab.experiments.conftest import SMALL
from tests.lab.experiments.test_command import aiops

pytestmark = pytest.mark.slow


def run(case: BandwidthCase) -> tuple[BandwidthOutcome, list[int]]:
    case.check()
    heard: list[int] = []
    with material(case.network, case.dataset, case.hidden) as files:
        outcome = asyncio.run(carry_out(case, files, heard.append))
    assert case.network == "transformer" or not files.folder.exists()
    return outcome, heard


def test_threads_of_one_process_behind_a_link() -> None:
    """The same bytes are counted by the server, by the link and by the workers."""
    case = dataclasses.replace(SMALL, per_process=2, link="80Mbit/s", delay=0.001)
    outcome, heard = run(case)
    account = outcome.report["ledger"]
    assert (account["pushed"]["bytes"], account["fetched"]["bytes"]) == (
        outcome.link["up"],
        outcome.link["down"],
    )
    said: Counter[str] = Counter()
    for report in outcome.workers:
        said.update(report.account)
    assert said["pushed"] == account["pushed"]["payload"]
    assert said["fetched"] == account["fetched"]["payload"]
    assert [report.gradients for report in outcome.workers] == [60]
    assert outcome.report["gradients"] == heard[-1] == 60
    assert outcome.samples[0].gradients == 0
    assert outcome.samples[-1].gradients == outcome.samples[-1].version == 60
    assert outcome.samples[-1].pushed == account["pushed"]["bytes"], "its observer is not counted"
    assert 0 < outcome.idle < 1


def test_gates_and_codecs_are_the_servers() -> None:
    gate = "periodic:k_push=3,k_fetch=2"
    case = dataclasses.replace(SMALL, gate=gate, push_codec=("int8",), fetch_codec=("int8",))
    outcome, _heard = run(case)
    assert sum(report.gradients for report in outcome.workers) == 60
    account = outcome.report["ledger"]
    pushes = outcome.report["gradients"]
    assert pushes in (20, 21), "every third of each worker's, and what is left at the end"
    assert account["pushed"]["times"]["skipped"] == 60 - pushes
    assert account["pushed"]["payload"] < account["pushed"]["raw"]
    assert sum(report.account["skipped"] for report in outcome.workers) > 0


def test_a_transformer_learns_from_python_s_own_text() -> None:
    pytest.importorskip("torch")
    text = {"policy": "schedule-free", "network": "transformer", "per_process": 2}
    case = dataclasses.replace(SMALL, **text, gradients=24)
    outcome, _heard = run(case)
    assert outcome.report["gradients"] == 24
    first, last = outcome.samples[0], outcome.samples[-1]
    assert first.loss == pytest.approx(np.log(256), abs=0.3), "it knows nothing"
    assert last.loss < first.loss - 0.3


def test_a_server_that_does_not_start() -> None:
    case = dataclasses.replace(SMALL, set=("no=1",))
    with (
        material(case.network, case.dataset, case.hidden) as files,
        pytest.raises(ProcessFailed) as caught,
    ):
        asyncio.run(carry_out(case, files))
    assert any("no setting" in line for line in caught.value.details["stderr"])


def test_the_command_does_nothing_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "results.json"

    def command(*flags: str) -> tuple[int, list[dict[str, Any]]]:
        arguments = ["--dataset=digits", "--hidden=8", "--gradients=40", "--workers=2"]
        arguments += ["--per-process=2", "--samples=0", "--no-plot", "--json", f"--out={out}"]
        status, said, _stderr = aiops(*arguments, *flags, capsys=capsys, command="bandwidth")
        return status, json.loads(said) if said else []

    status, first = command()
    assert (status, len(first)) == (0, 1)
    status, both = command("--gate=none", "--gate=periodic:k_push=2")
    assert (status, len(both)) == (0, 2)
    assert both[0] == first[0], "what has been run is taken from the file"
    before = out.stat().st_mtime_ns
    status, _same = command()
    assert (status, out.stat().st_mtime_ns) == (0, before)
    status, _again = command("--again")
    assert status == 0
    assert out.stat().st_mtime_ns > before, "it was made again"
    assert {path.name for path in tmp_path.iterdir()} == {
        "results.json",
        "results-runs.csv",
        "results-curves.csv",
    }
