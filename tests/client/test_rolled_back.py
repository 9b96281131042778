"""A session and a server that comes back with its state, or with an earlier one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from aiops.client.params import Params
from aiops.common.generations import DRAWN
from aiops.durable.generations import Generations
from aiops.engine.events import Event, Joined, Reply
from aiops.errors import BadPush, Restarted, Superseded
from aiops.model.tables import Table
from aiops.state.directory import GenerationFile
from aiops.wire.messages import Hello, Push, Welcome
from tests.client.test_session import ONES, Pair, Server, ready, stepped, values

RUN = "8c2f"


class KeptServer(Server):
    """A server that has these pushes of client ``me``, and is at a generation of its run."""

    def __init__(self, taken: int, generation: int, versions: list[int]) -> None:
        super().__init__(run=RUN)
        handle, self.hellos = self.engine.handle, list[Hello]()
        file = GenerationFile(0)
        for _ in range(generation):
            file = file.started(1, versions)
        told = Generations(RUN, file).told

        def with_generation(event: Event) -> list[object]:
            effects: list[object] = [*handle(event)]
            if isinstance(event, Joined) and isinstance(event.hello, Hello):
                self.hellos.append(event.hello)
                for index, effect in enumerate(effects):
                    if isinstance(effect, Reply) and isinstance(effect.message, Welcome):
                        welcome = told(effect.message, event.hello, "written")
                        effects[index] = replace(effect, message=welcome)
            return effects

        if taken:  # as it was
            pair, params = ready(self)
            for _ in range(taken):
                pair.ask(pair.requests.push(ONES, params, params))
            pair.cut()
        self.engine.handle = with_generation  # type: ignore[assignment, method-assign]
        self.received.clear()

    @property
    def pushes(self) -> list[int]:
        return [message.seq for message in self.received if isinstance(message, Push)]


def trained(count: int) -> tuple[Pair, Params, Params]:
    """Return a pair after so many steps, its parameters, and those of two steps before."""
    pair, params = ready(KeptServer(0, 1, []))
    old = params.copy()
    for step in range(count):
        pair.ask(pair.requests.push(ONES, params, params))
        if step == count - 3:
            old = params.copy()
    return pair, params, old


def comes_back(pair: Pair, taken: int, generation: int = 2) -> KeptServer:
    """Have the server come back with so many of the pushes."""
    pair.cut()
    pair.server = server = KeptServer(taken, generation, [taken])
    pair.connect()
    pair.settle()
    return server


@pytest.mark.parametrize("sent", [False, True])
def test_nothing_was_lost(sent: bool) -> None:
    pair, params, _old = trained(5)
    request = pair.requests.push(ONES, params, params)
    if sent:
        pair.move(None, 0)
    server = comes_back(pair, 6 if sent else 5)
    assert request.value().version == 6
    assert server.version == 6
    assert server.pushes == [6]
    assert values(params) == stepped(6)
    assert pair.session.restarts.rolled_back == 0
    assert [(h.run, h.generation, h.acked) for h in server.hellos] == [(RUN, DRAWN, 5)]


@pytest.mark.parametrize("sent", [False, True])
def test_a_push_at_a_version_that_is_lost(sent: bool, caplog: pytest.LogCaptureFixture) -> None:
    pair, params, _old = trained(5)
    if not sent:
        pair.cut()
    request = pair.requests.push(ONES, params, params)
    if sent:
        pair.move(None, 0)
    server = comes_back(pair, 3)
    said = "sent before, and is not part of the parameters that are left" if sent else "not pushed"
    with pytest.raises(Restarted, match=f"has lost version 5, .* computed at: .*{said}"):
        request.value()
    assert server.pushes == []
    assert pair.session.restarts.rolled_back == 2
    assert caplog.messages == [
        f"{pair.session.server} came back at version 3: 2 pushes that it had acknowledged"
        " (--acks written) are lost"
    ]
    assert pair.ask(pair.requests.fetch(params))
    assert values(params) == stepped(3)
    assert pair.ask(pair.requests.push(ONES, params, params)).version == 4
    assert server.pushes == [7]


def test_a_push_at_a_version_that_survived() -> None:
    pair, params, old = trained(5)
    assert old.version == 3
    request = pair.requests.push(ONES, old, params)
    server = comes_back(pair, 3)
    receipt = request.value()
    assert (receipt.version, receipt.staleness, receipt.used) == (4, 0, True)
    assert server.pushes == [6]
    assert values(params) == stepped(4)
    assert pair.session.restarts.rolled_back == 2


def test_losses_are_counted_once_and_added_up() -> None:
    pair, params, _old = trained(5)
    comes_back(pair, 3)
    pair.cut()
    pair.connect()
    pair.settle()
    assert pair.session.restarts.rolled_back == 2
    pair.ask(pair.requests.fetch(params))
    for _ in range(4):
        pair.ask(pair.requests.push(ONES, params, params))
    comes_back(pair, 1, generation=3)  # seq 1, of 1 to 3 and 6 to 9
    assert pair.session.restarts.rolled_back == 2 + 6


def test_what_was_refused_or_given_up_is_not_lost() -> None:
    pair, params, _old = trained(3)
    for _ in range(2):
        with pytest.raises(BadPush):
            pair.ask(
                pair.requests.push({name: a * np.nan for name, a in ONES.items()}, params, None)
            )
    pair.ask(pair.requests.push(ONES, params, params))
    pair.session.abandon(pair.requests.push(ONES, params, params))
    pair.settle()
    assert pair.session.pending.seq == 7
    comes_back(pair, 2)
    assert pair.session.restarts.rolled_back == 2  # 3 and 6


def test_the_last_gradient_is_not_applied_again_if_it_may_be_lost() -> None:
    pair, params, old = trained(5)
    request = pair.requests.reapply(old, params)
    comes_back(pair, 3)
    with pytest.raises(Restarted):
        request.value()
    assert pair.session.restarts.rolled_back == 2


def test_parameters_are_fetched_in_full_only_if_they_are_lost() -> None:
    for taken, changed in ((5, False), (4, True)):
        pair, params, _old = trained(5)
        comes_back(pair, taken)
        assert pair.ask(pair.requests.fetch(params)) is changed
        assert values(params) == stepped(taken)


def test_a_lower_generation_is_left() -> None:
    pair, _params, _old = trained(5)
    comes_back(pair, 5, generation=3)
    with pytest.raises(Superseded):
        comes_back(pair, 5, generation=2)


def test_rows_of_versions_that_are_lost() -> None:
    pair = Pair(Server(run=RUN))
    pair.connect()
    pair.ask(pair.requests.define({}, {"t": Table(9, 2)}))
    run, rows = pair.session.info.run, pair.session.info.rows
    rows.versions["t"], rows.connections["t"] = 7, ("me", 1)
    request = pair.requests.push_rows("t", [1], np.ones((1, 2), np.float32), version=7)
    welcome = Welcome(0, 3, RUN, b"", "asgd", {}, {}, 0, (), 0, (), (), generation=1, intact=(9, 6))
    run.welcomed(welcome, 2, "aiops://a")
    assert pair.session.restarts.outdated(request, "aiops://a")
    rows.forget(run)
    assert "t" not in rows.versions


@pytest.mark.parametrize(
    ("taken", "said"), [(3, ": 2 pushes that"), (0, ": at most 5 pushes that")]
)
def test_a_client_that_was_forgotten_is_told_a_bound(
    taken: int, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The server has none of its pushes: they are lost, or it has forgotten the client."""
    pair, _params, _old = trained(5)
    comes_back(pair, taken)
    assert said in caplog.text
    assert pair.session.restarts.rolled_back == 5 - taken
    assert ("as it knows none of them" in caplog.text) == (not taken)
