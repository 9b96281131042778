"""A real server process ends at each named point, is started again, and has lost nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiops.kernels.backend import resolve
from aiops.lab.torture.plan import KillMoment, TrialPlan
from aiops.lab.torture.spawner import Spawner
from aiops.lab.torture.trial import Trial
from aiops.net.faulty_disk import points


@pytest.fixture(scope="module")
def spawner() -> Iterator[Spawner]:
    with Spawner() as made:
        made.rehearse()
        yield made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "acks"),
    [
        *((point, "durable") for point in points()),
        *((point, "written") for point in points() if point != "journal.synced"),  # it syncs rarely
    ],
)
def test_a_server_that_ends_there_loses_nothing(
    point: str, acks: str, spawner: Spawner, tmp_path: Path
) -> None:
    """The workers ride it out; each acknowledged push counts once; the bits are the same."""
    plan = TrialPlan(
        seed=0,
        variant="asgd",
        near=acks == "written",
        acks=acks,
        workers=2,
        moments=(KillMoment(100_000, point=point),),  # the point comes first
        pauses=(0.0, 0.0),
        size=1024,
        cells=512,
        snapshot_every=0.02,
    )
    result = Trial(plan, tmp_path, spawner).kill_servers()
    assert result.wrong == []
    assert result.points == {point: 1}
    assert result.acknowledged > 0


def say_backend() -> None:
    print(resolve("auto"))


@pytest.mark.slow
def test_processes_compile_nothing(spawner: Spawner, tmp_path: Path) -> None:
    """With Numba each worker would compile its codec's loops, for seconds."""
    process = spawner.start(say_backend, tmp_path / "said")
    assert process.wait(60) == 0, process.text()
    assert process.text().split()[-1] == "numpy"
