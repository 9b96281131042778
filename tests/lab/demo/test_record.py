"""The record of a demo: samples, and the summary made of them."""

from __future__ import annotations

import json
import math

from aiops.lab.demo.record import DemoRecord
from aiops.lab.demo.settings import DemoSettings
from tests.lab.demo.conftest import report


def test_a_sample_counts_the_workers_and_not_the_observer(record: DemoRecord) -> None:
    first, second, third = record.samples
    assert (first.updates, second.updates, third.updates) == (0, 80, 200)
    assert (second.bytes_pushed, second.bytes_fetched) == (2000, 4000)
    assert (first.rate, second.rate, third.rate) == (0.0, 80.0, 120.0)
    assert third.mean_staleness == 1.25
    assert record.last is third


def test_staleness_and_steps(record: DemoRecord) -> None:
    assert record.staleness() == {0: 50, 1: 100, 3: 50}
    assert record.steps == 200


def test_the_states_of_a_worker(record: DemoRecord) -> None:
    worker = DemoRecord(record.settings).workers[0]
    states = [worker.state]
    worker.ready = True
    states.append(worker.state)
    worker.progress = record.workers[0].progress
    states.append(worker.state)
    worker.ended = True
    assert [*states, worker.state] == ["starting", "ready", "training", "done"]


def test_the_summary(record: DemoRecord) -> None:
    found = json.loads(json.dumps(record.summary(complete=True, plot="out/demo.png")))
    assert found.pop("demo") == "fasgd"
    assert found.pop("machine")["packages"]["numpy"]
    assert found.pop("options")["dataset"] == "digits"
    assert found == {
        "policy": "fasgd",
        "dataset": "digits",
        "workers": 2,
        "seed": 0,
        "batch_size": record.settings.batch_size,
        "lr": 0.01,
        "complete": True,
        "steps": 200,
        "seconds": 2.0,
        "test_accuracy": 0.95,
        "test_loss": 0.25,
        "version": 200,
        "updates": 200,
        "updates_per_second": 100.0,
        "mean_staleness": 1.25,
        "bytes_pushed": 8000,
        "bytes_fetched": 16000,
        "refused": {"stale": 3},
        "kernels": "numpy",
        "plot": "out/demo.png",
        "bytes_saved": 8,
        "bytes_by_tensor": {"w": {"pushed": 5, "fetched": 3, "saved": 8}},
    }


def test_the_summary_of_a_run_that_never_began() -> None:
    found = DemoRecord(DemoSettings.make()).summary(complete=False, plot=None)
    assert found["test_accuracy"] is None
    assert (found["version"], found["seconds"], found["complete"]) == (0, 0.0, False)


def test_a_loss_that_is_no_number_is_none_in_json(record: DemoRecord) -> None:
    record.note(report(300, {"0": 300}, 1), 300, math.nan, 0.1)
    found = json.dumps(record.summary(complete=True, plot=None), allow_nan=False)
    assert json.loads(found)["test_loss"] is None
