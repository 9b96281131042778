"""Numbers that clients log, over all of them: `aiops.engine.logged`."""

from __future__ import annotations

import numpy as np
import pytest

from aiops.common.gathering import gathered
from aiops.engine import logged
from aiops.engine.logged import GONE, LATELY
from aiops.engine.membership import MOST_LOGGED
from aiops.wire.fields import MAX_LOGGED
from aiops.wire.messages import Leave, Log
from tests.engine.test_membership import logs, met
from tests.inline import Inline


def test_of_those_that_are_here() -> None:
    found = met(3)
    for client, loss in ((0, 1.0), (1, 2.0), (2, 6.0)):
        logs(found, client, loss=loss, accuracy=0.5)
    assert found.logged.summary(0.0) == {"loss": [3.0, 1.0, 6.0], "accuracy": [0.5] * 3}


def test_what_a_client_logs_as_it_leaves_counts_for_a_while() -> None:
    found = met(2)
    logs(found, 0, 10.0, loss=1.0)
    logs(found, 1, 10.0, loss=3.0)
    found.leave(1)
    assert found.logged.summary(10.0 + LATELY)["loss"] == [2.0, 1.0, 3.0]
    assert found.logged.summary(10.1 + LATELY)["loss"] == [1.0, 1.0, 1.0]


def test_what_a_loop_logs_at_its_end_is_in_the_report_of_its_server() -> None:
    """Its client sends the numbers with its goodbye."""
    inline = Inline("asgd")
    inline.define({"w": np.ones(3, np.float32)})
    inline.join(1)
    inline.receive(1, Log(0, (("accuracy", 0.75),)))
    inline.receive(1, Leave(9))
    assert gathered(inline.engine.gather(0))["logged"] == {"accuracy": [0.75] * 3}
    later = gathered(inline.engine.gather(0, inline.now + 2 * LATELY))
    assert later["logged"] == {}, "also where nothing has happened since"


def test_a_client_that_is_back_counts_once() -> None:
    found = met(2)
    logs(found, 0, loss=1.0)
    logs(found, 1, loss=3.0)
    found.leave(1)
    found.join(7, "client-1", 2, "w1", True, found.traffic(1))
    assert found.logged.summary(0.0)["loss"] == [2.0, 1.0, 3.0]
    logs(found, 7, loss=5.0)
    assert found.logged.summary(10 * LATELY)["loss"] == [3.0, 1.0, 5.0]


@pytest.mark.parametrize("noticed", ["before", "after"])
def test_a_worker_that_was_started_again_counts_in_the_place_of_itself(noticed: str) -> None:
    """It is another client, of the same name; the end of the first one may be noticed later."""
    found = met(2)
    logs(found, 0, loss=1.0)
    logs(found, 1, loss=9.0)
    if noticed == "before":
        found.leave(1)
        assert found.logged.summary(0.0)["loss"] == [5.0, 1.0, 9.0]
    found.join(7, "another", 1, "w1", True, found.traffic(1))
    if noticed == "after":
        assert found.logged.summary(0.0)["loss"] == [5.0, 1.0, 9.0], "it is still there"
        found.leave(1)
    assert found.logged.summary(0.0)["loss"] == [1.0, 1.0, 1.0]
    logs(found, 7, loss=3.0)
    assert found.logged.summary(0.0)["loss"] == [2.0, 1.0, 3.0]
    found.leave(7)
    assert found.logged.summary(0.0)["loss"] == [2.0, 1.0, 3.0], "the last one counts for a while"


def test_names_of_those_that_are_forgotten_are_forgotten() -> None:
    found = met(4 * GONE)
    for client in range(4 * GONE):
        logs(found, client, loss=1.0)
        if client:
            found.leave(client)
            logs(found, 0, loss=0.0)
    assert len(found.logged._latest) == len(found.logged._members)


def test_few_of_those_that_left_are_kept() -> None:
    found = met(4 * GONE)
    for client in range(4 * GONE):
        logs(found, client, loss=float(client))
        if client:
            found.leave(client)
            logs(found, 0, loss=0.0)
    assert GONE < len(found.logged._members) <= 2 * GONE + 4
    assert found.logged.summary(0.0)["loss"][2] == 4 * GONE - 1, "the last ones"


def test_names_are_those_that_most_clients_log() -> None:
    found = met(4)
    logs(found, 0, **{f"own{k}": 1.0 for k in range(MAX_LOGGED)})
    logs(found, 1, **{f"other{k}": 1.0 for k in range(MAX_LOGGED)})
    for client in (2, 3):
        logs(found, client, loss=1.0)
    for _ in range(2):
        first, *names = found.logged.summary(0.0)
        assert first == "loss"
        assert len(names) == MAX_LOGGED - 1
        assert all(name.startswith("own") for name in names), "of the client that came first"
        logs(found, 1, other0=1.0)


def test_sums_of_the_largest_numbers_are_finite() -> None:
    found = met(2)
    for client in (0, 1):
        logs(found, client, loss=1.7e308, most=MOST_LOGGED, least=-MOST_LOGGED)
    most = {"most": [MOST_LOGGED] * 3, "least": [-MOST_LOGGED] * 3}
    assert found.logged.summary(0.0) == most


def test_of_thousands_those_that_logged_last_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logged, "LOOKED_AT", 20)
    found = met(100)
    for client in range(100):
        logs(found, client, loss=float(client), accuracy=0.5)
    assert found.logged.summary(0.0)["loss"] == [94.5, 90.0, 99.0]
