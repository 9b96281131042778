"""The servers that a lead can go on with, by what they say that they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from aiops.errors import RolledBack, UsageError
from aiops.shards.common_moment import CommonMoment
from aiops.shards.followers import Followers
from aiops.shards.readmission import Readmission
from aiops.shards.reports import OWN_GENERATION, PLACE
from aiops.wire.server_messages import ShardState
from tests.rows import each_row

EMPTY = ShardState(0, True, "", 0, 0, 0, 0, False, {})
HISTORY = ((1, 0), (3, 40))


def state(shard: int = 1, **holds: Any) -> ShardState:
    """Return the state of a follower that is where its lead is, in row 50."""
    return ShardState(0, True, "run", shard, 3, 7, 7, False, {"reached": 50, **holds})


@dataclass
class Model:
    """A lead's model at version 7."""

    version: int = 7
    fit: bool = True
    loads: dict[int, object] = field(default_factory=dict)

    def fits(self, shard: int, state: ShardState) -> bool:
        return self.fit


def lead(model: Model | None, *, kept: bool = True) -> Readmission:
    found = Readmission(Followers([("", 71), ("there", 72)]), "run", kept=kept)
    found.model, found.history = model, HISTORY  # type: ignore[assignment]
    return found


class TestFollowers:
    def test_one_with_nothing_begins_with_a_lead_without_a_model(self) -> None:
        assert lead(None).refusal(1, EMPTY) is None

    def test_one_with_nothing_can_be_given_its_beginning_again(self) -> None:
        assert lead(Model(loads={1: "order"})).refusal(1, EMPTY) is None

    def test_one_with_nothing_cannot_be_given_updates_again(self) -> None:
        error = lead(Model()).refusal(1, EMPTY)
        assert isinstance(error, UsageError)
        assert "shard 1 of 3 (port 71) has no state, and its lead has one of run run" in str(error)

    def test_one_that_is_where_its_lead_is_goes_on(self) -> None:
        assert lead(Model()).refusal(1, state(history=HISTORY)) is None

    @pytest.mark.parametrize("kept", [True, False])
    def test_both_keep_a_state_or_none(self, kept: bool) -> None:
        made = ShardState(0, not kept, "", 0, 0, 0, 0, False, {})
        names = ["its lead", "shard 2 of 3 (there:72)"][:: 1 if kept else -1]
        found = str(lead(None, kept=kept).refusal(2, made))
        assert found.startswith(f"{names[0]} keeps a state and {names[1]} does not")

    def test_each_brings_the_state_of_its_own_place(self) -> None:
        assert "holds shard 2 of 3 of run run" in str(lead(Model()).refusal(1, state(2)))

    def test_a_model_that_its_lead_does_not_know_is_of_another_time(self) -> None:
        assert "and its lead has none" in str(lead(None).refusal(1, state()))

    def test_one_that_lacks_what_its_lead_relies_on_has_it_go_back(self) -> None:
        error = lead(Model(fit=False)).refusal(1, state())
        assert isinstance(error, RolledBack)
        assert "is at version 7, and its lead at 7, or it lacks its part" in str(error)

    def test_one_with_rows_of_an_earlier_lead_has_it_go_back(self) -> None:
        """The lead's generation 3 began behind row 40, and the follower went on to row 50."""
        error = lead(Model()).refusal(1, state(history=((1, 0),)))
        assert isinstance(error, RolledBack)

    def test_one_that_another_lead_has_led_all_along_is_a_stranger(self) -> None:
        error = lead(Model()).refusal(1, state(history=((2, 0),)))
        assert isinstance(error, UsageError)
        assert "its last lead is none that this one knows of" in str(error)

    def test_a_lead_without_a_state_goes_by_run_and_place_alone(self) -> None:
        made = ShardState(0, False, "run", 1, 3, 5, 5, False, {})
        assert lead(Model(fit=False), kept=False).refusal(1, made) is None


class TestStandbys:
    def lead(self, model: Model, **settings: Any) -> Readmission:
        """Return a lead that has lost shard 1."""
        found = lead(model, **settings)
        found._followers.lost[1] = "it is gone"
        return found

    def test_it_has_the_place_of_a_server_that_is_lost(self) -> None:
        assert self.lead(Model()).place_refusal(state()) == ""

    def test_not_that_of_one_that_is_there(self) -> None:
        found = self.lead(Model()).place_refusal(state(2))
        assert found.startswith("shard 2 of 3 (there:72) is there: ")

    def test_not_with_less_than_was_acknowledged(self) -> None:
        found = self.lead(Model(fit=False)).place_refusal(state())
        assert "acknowledged pushes would be lost" in found

    def test_not_with_a_state_of_another_run(self) -> None:
        other = ShardState(0, True, "other", 1, 3, 7, 7, False, {})
        assert "of run other" in self.lead(Model()).place_refusal(other)

    @each_row("shard", [0, 3, 1 << 40])
    def test_not_one_that_there_is_none_of(self, shard: int) -> None:
        found = self.lead(Model()).place_refusal(state(shard))
        assert found == f"this server leads no shard {shard} with a state"

    def test_not_without_states(self) -> None:
        assert "leads no shard 1" in self.lead(Model(), kept=False).place_refusal(state())


def test_strangers_are_named() -> None:
    moment = CommonMoment({1: state(history=((2, 0),)), 2: state(2, history=((1, 0),))}, HISTORY)
    found = lead(None).strangers(moment)
    assert found.startswith("shard 1 of 3 (port 71): ")
    assert lead(None).strangers(CommonMoment({2: state(2, history=HISTORY)}, HISTORY)) == ""


class TestPlaces:
    def test_each_is_a_term_above_all_that_went_before(self) -> None:
        followers = Followers([("", 71)])
        first = followers.next_place(1, 5)
        followers.places[1] = first
        second = followers.next_place(1, 5)
        assert 5 < first < second
        followers.note(1, {PLACE: second, OWN_GENERATION: 10 * second})
        assert followers.next_place(1, 5) > 10 * second

    def test_it_has_begun_once_its_server_says_so(self) -> None:
        followers = Followers([("", 71)])
        assert followers.has_begun(1)
        followers.places[1] = number = followers.next_place(1, 5)
        assert not followers.has_begun(1)
        followers.note(1, {OWN_GENERATION: number})
        assert followers.has_begun(1)
