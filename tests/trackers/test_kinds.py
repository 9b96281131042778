"""Each kind of tracker, with the package that it is for."""

from __future__ import annotations

import importlib
import sqlite3
import sys
from pathlib import Path

import pytest

from aiops.errors import UsageError
from aiops.trackers import PACKAGES, RunMetrics, tracker_of

SETTINGS = {"policy": "asgd", "lr": "0.1"}
COURSE = [
    RunMetrics(
        step, 1_700_000_000.0 + step, {"loss": 1 / step, "server/version": step, "acc@5": 0.5}
    )
    for step in (5, 10, 7)  # after a rollback the version is older
]


def tracked(kind: str, target: str) -> None:
    """Send all to a tracker."""
    pytest.importorskip(PACKAGES[kind].split("-")[0])
    opens, found = tracker_of(f"{kind}:{target}")
    tracker = opens(found, SETTINGS)
    for metrics in COURSE:
        tracker.on_metrics(metrics)
    tracker.close()


def test_tensorboard(tmp_path: Path) -> None:
    tracked("tensorboard", str(tmp_path / "runs" / "first"))
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (tmp_path / "runs" / "first").iterdir()
    events = [event for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]
    text, *rest = events
    assert b"| policy | `asgd` |" in text.summary.value[0].tensor.string_val[0]
    for event, metrics in zip(rest, COURSE, strict=True):
        assert (event.step, event.wall_time) == metrics[:2]
        found = {v.tag: v.tensor.float_val[0] for v in event.summary.value}
        assert found == pytest.approx(dict(metrics.values))


@pytest.mark.filterwarnings("ignore")
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    tracked("wandb", "aiops/first")
    (run,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    kept = run.read_bytes()
    assert kept.count(b"loss") >= len(COURSE)
    assert b"asgd" in kept


@pytest.mark.filterwarnings("ignore")  # of the packages that it is made of
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sqlalchemy")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    monkeypatch.chdir(tmp_path)
    tracked("mlflow", "first")
    tracked("mlflow", "first")  # the experiment is there
    with sqlite3.connect(tmp_path / "runs.db") as kept:
        assert kept.execute("select count(*) from metrics where key = 'acc_5'").fetchone() == (6,)
        rows = kept.execute("select key, value, step from metrics where key = 'loss'").fetchall()
        assert sorted(rows) == sorted([("loss", 1 / m.step, m.step) for m in COURSE] * 2)
        params = kept.execute("select key, value from params").fetchall()
        assert set(params) == set(SETTINGS.items())
        assert kept.execute("select distinct status from runs").fetchall() == [("FINISHED",)]
    kept.close()


@pytest.mark.filterwarnings("ignore")
def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    tracked("trackio", "first")
    with sqlite3.connect(tmp_path / "first.db") as kept:
        steps = kept.execute("select step from metrics order by rowid").fetchall()
    kept.close()
    assert [step for (step,) in steps] == [metrics.step for metrics in COURSE]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("wadb:x", "there is no tracker 'wadb'; did you mean 'wandb'?"),
        ("tensorboard", "tensorboard needs a target: tensorboard:NAME"),
        ("wandb:", "wandb needs a target"),
    ],
)
def test_texts_that_name_none(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says.replace("?", r"\?")):
        tracker_of(text)


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_package_that_is_missing_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, f"aiops.trackers.{kind}", None)
    with pytest.raises(UsageError, match=f"pip install {PACKAGES[kind]}"):
        tracker_of(f"{kind}:x")


def test_packages_that_do_not_fit_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise TypeError("descriptors cannot be created directly")

    monkeypatch.setattr(importlib, "import_module", broken)
    with pytest.raises(UsageError, match="wandb cannot be imported: TypeError: descriptors cannot"):
        tracker_of("wandb:x")
