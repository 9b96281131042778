"""What followers have read for the filters of their lead, and what it asks for."""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
import pytest

from aiops.engine.events import Applied, Order, Reported
from aiops.errors import RemoteProtocolError
from aiops.filters.sample import Sample
from aiops.filters.screen import FIRST_SEED, SEEDING
from aiops.model.arena import Arena
from aiops.model.layout import Layout
from aiops.model.placement import Placement
from aiops.shards.measuring import PARAMS, SAMPLE, SAMPLES, Measuring, PartSampler
from aiops.store.parameters import MeasureJob
from aiops.wire.server_messages import RunUpdate, UpdateDone
from tests.rows import each_row
from tests.shards.test_filtered import servers

SEED = struct.pack(">q", 77)
LAYOUT = Layout(
    [
        ("d", "float64", (31, 3)),
        ("w", "float32", (997, 5)),
        ("empty", "float32", (0, 4)),
        ("h", "float16", (4000,)),
        ("one", "float16", ()),
    ]
)


@each_row("shards", range(1, 9))
def test_the_parts_of_a_sample_are_the_sample(shards: int) -> None:
    """However a model is cut, its servers' values in their order are those of one server."""
    sample, placement = Sample(LAYOUT, 5), Placement.even(LAYOUT, shards)
    arena = Arena(LAYOUT)
    draw = np.random.default_rng(shards)
    for view in arena.views.values():
        view[...] = draw.standard_normal(view.shape)
    found = []
    for held, low in zip(placement.layouts, placement.starts, strict=True):
        data = arena.data[low : low + held.nbytes]
        found.append(sample.of(held).read(data))
    assert np.concatenate(found).tobytes() == sample.read(arena.data).tobytes()
    assert sum(len(each) > 0 for each in found) == len(placement.used)


def draw(measuring: Measuring, seed: bytes) -> None:
    """Have the lead's filters draw the positions of a seed."""
    screen = measuring._screen
    assert screen is not None
    screen._seen, screen._digest = SEEDING, seed
    screen._draw()


class Lead:
    """The updates of a lead with one follower, whose version is 0."""

    def __init__(self) -> None:
        engine = servers(2, "robust")
        lead: Any = engine.lead
        self.updating = lead.model.updating
        self.measuring = self.updating._measuring
        self.store = engine.stores[0]
        gradient: Any = type("Portion", (), {"number": 0, "data": b"", "parts": ()})()
        self.job = MeasureJob(self.store, gradient, None, 1.0, bytes.__len__)  # type: ignore[arg-type]
        draw(self.measuring, SEED)
        self.measuring.known(self.job)
        [_mine, self.count] = self.measuring._counts

    def values(self, count: int | None = None) -> bytes:
        return np.ones(self.count if count is None else count).tobytes()

    def begin(self) -> list[Order]:
        apply: Any = type("Begun", (), {"ticket": 5, "job": self.job})()
        return [each for each in self.updating.begin(apply, 0, 1.0) if isinstance(each, Order)]

    def done(self, *numbers: float) -> Any:
        sums = np.array(numbers, "<f8").tobytes()
        message = UpdateDone(5, sums, b"")
        return self.updating.done(Reported(0.0, 1, message), message)


class TestAsking:
    def test_nothing_that_is_known(self) -> None:
        lead = Lead()
        lead.measuring.computed(1, 0, SEED, lead.values())
        assert lead.begin() == []

    @each_row(("version", "seed", "count"), [(1, SEED, None), (0, FIRST_SEED, None), (0, SEED, 3)])
    def test_for_another_version_and_for_other_positions(
        self, version: int, seed: bytes, count: int | None
    ) -> None:
        """A follower that was started again has not said what it read of the last version."""
        lead = Lead()
        lead.measuring.computed(1, version, seed, lead.values(count))
        [order] = lead.begin()
        assert isinstance(order.message, RunUpdate)
        assert order.message.push == 0  # it has no part of the push
        assert order.message.work == {SAMPLE: SEED, PARAMS: True}

    def test_an_answer_is_joined_with_what_the_lead_has_read(self) -> None:
        lead = Lead()
        lead.begin()
        count = lead.count
        assert lead.done(3.0, *[1.0] * count, *[2.0] * count) == []
        [mine, _theirs] = lead.measuring._counts
        own = np.array([7.0, *[0.0] * mine, *[5.0] * mine]).view(np.int64)
        found = lead.updating.applied(Applied(1.0, 5, own))
        assert isinstance(found, Applied)
        expected = [7.0, *[0.0] * mine, *[1.0] * count, *[5.0] * mine, *[2.0] * count]
        assert found.sums.view(np.float64).tolist() == expected

    def test_an_answer_that_makes_no_sense_is_refused(self) -> None:
        lead = Lead()
        lead.begin()
        with pytest.raises(RemoteProtocolError, match="sums of 1 tensors"):
            lead.done(1.0)
        with pytest.raises(RemoteProtocolError, match="that no gradient has"):
            lead.done(1.0, *[np.inf] * 2 * lead.count)
        with pytest.raises(RemoteProtocolError, match="that are not finite"):
            lead.done(1.0, *[1.0] * lead.count, *[np.inf] * lead.count)

    @each_row("wrong", [np.inf, -np.inf, np.nan])
    def test_parameters_that_are_not_finite_are_refused(self, wrong: float) -> None:
        """One would be in the means of a worker for good."""
        lead = Lead()
        values = np.ones(lead.count)
        values[-1] = wrong
        with pytest.raises(RemoteProtocolError, match=r"shard 1 .* that are not finite"):
            lead.measuring.computed(1, 0, SEED, values.tobytes())
        assert lead.begin() != []


class Awaited:
    """A gathering that awaits a follower's portions of these pushes."""

    def __init__(self, *numbers: int) -> None:
        self.numbers = set(numbers)

    def awaits(self, number: int, shard: int) -> bool:
        return shard == 1 and number in self.numbers


class TestSamples:
    """A follower that lies can neither fill its lead's memory, nor teach its filters nonsense."""

    @pytest.fixture
    def measuring(self) -> Measuring:
        found = Lead().measuring
        found._gathering = Awaited(*range(1, 100_000))  # type: ignore[assignment]
        return found

    @pytest.fixture
    def fine(self, measuring: Measuring) -> bytes:
        return np.ones(measuring._counts[1]).tobytes()

    def test_what_is_of_no_use_is_not_kept(self, measuring: Measuring, fine: bytes) -> None:
        wrong = (FIRST_SEED, fine), (SEED, 1000 * fine), (SEED, fine[:-1]), (b"", b"")
        for seed, values in wrong:
            measuring.arrived(1, 1, seed, values)
        measuring.arrived(0, 1, SEED, fine)  # nothing of such a push is awaited
        assert measuring.kept == 0
        measuring.arrived(1, 1, SEED, fine)
        assert measuring._samples == {1: {1: fine}}

    @pytest.mark.parametrize("value", [np.nan, -1e300])
    def test_what_makes_no_sense_is_refused(self, measuring: Measuring, value: float) -> None:
        values = np.full(measuring._counts[1], value).tobytes()
        with pytest.raises(RemoteProtocolError, match="that no gradient has"):
            measuring.arrived(1, 1, SEED, values)

    def test_they_have_a_bound(self, measuring: Measuring, fine: bytes) -> None:
        """However many pushes wait for the portions of another follower."""
        count = 0
        while len(measuring._samples) == count:
            count += 1
            measuring.arrived(count, 1, bytes(SEED), bytes(bytearray(fine)))
        held = sum(
            sys.getsizeof(theirs) + sys.getsizeof(values) + sys.getsizeof(number)
            for number, theirs in measuring._samples.items()
            for values in theirs.values()
        )
        assert held + sys.getsizeof(measuring._samples) <= measuring.kept <= SAMPLES
        assert count > SAMPLES // (len(fine) + 1024)
        for number in range(count + 1):
            measuring.finished(number)
            measuring.finished(number)
        assert measuring.kept == 0

    def test_those_at_positions_of_before_are_dropped(self, measuring: Measuring) -> None:
        measuring.arrived(1, 1, SEED, np.ones(measuring._counts[1]).tobytes())
        draw(measuring, bytes(7) + b"x")
        measuring._follow()
        assert (measuring.kept, measuring._samples) == (0, {})


class TestFollowers:
    def test_a_lead_that_wants_something_else_is_refused(self) -> None:
        held = Placement.even(LAYOUT, 2).layouts[1]
        for compares in ((), "gradients", 1, ("gradients",)):
            with pytest.raises(ValueError, match="true or false was expected"):
                PartSampler(LAYOUT, held, compares)

    @each_row("work", [{SAMPLE: b"1"}, {SAMPLE: 5}, {SAMPLE: SEED, PARAMS: 1}])
    def test_work_that_makes_no_sense_is_refused(self, work: dict[str, Any]) -> None:
        store: Any = None
        sampler = PartSampler(LAYOUT, Placement.even(LAYOUT, 2).layouts[1], False)
        with pytest.raises(ValueError, match="a seed of 8 bytes"):
            sampler.job(store, work, None, None)
