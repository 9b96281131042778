"""A client's calls, driven by hand: a session and an engine through memory, no socket."""

from __future__ import annotations

from typing import Any

import pytest

from aiops.client.calls import Ask, Calls
from aiops.client.params import Params
from aiops.client.program import drive
from aiops.errors import NotReady
from aiops.wire.messages import Define
from tests.client.test_session import ARRAYS, Pair, Server, values
from tests.rows import each_row


class Client:
    """Carries calls out, to a server that is started again, without its model, at some of them."""

    def __init__(self, *restarts: str) -> None:
        self.pair, self.offers = Pair(), 0
        self._restarts = list(restarts)
        self.pair.connect()
        self.pair.settle()

    def define(self) -> Params:
        calls = Calls(self.pair.session, self.pair.requests)
        return drive(calls.define(ARRAYS, None, False), self.carry_out)

    def carry_out(self, order: Ask) -> Any:
        when = self._restarts.pop(0) if self._restarts else ""
        if when == "before":
            self.restart()
        if when == "forgotten":
            self.pair.server.engine.training = None
        request = order.make()
        if when == "sent":
            self.pair.move(down=0)
            self.restart()
        result = self.pair.ask(request)
        if when == "answered":
            self.restart()
        return result

    def restart(self) -> None:
        self.offers += sum(isinstance(each, Define) for each in self.pair.server.received)
        self.pair.cut()
        self.pair.server = Server()
        self.pair.connect()


@each_row(
    ("restarts", "lost"),
    [
        (["sent"], 1),
        (["answered"], 1),
        (["", "before"], 1),
        (["", "sent"], 1),
        (["answered", "", "answered", "", "sent", "before"], 4),
    ],
)
def test_a_model_that_is_lost_before_it_is_fetched_is_offered_again(
    restarts: list[str], lost: int
) -> None:
    client = Client(*restarts)
    params = client.define()
    assert client.offers == lost
    assert values(params) == client.pair.server.params() == values(ARRAYS)  # type: ignore[arg-type]
    assert sum(isinstance(each, Define) for each in client.pair.server.received) == 1


def test_a_server_that_takes_an_offer_and_has_no_model_is_offered_none() -> None:
    client = Client("", "forgotten")
    with pytest.raises(NotReady):
        client.define()
    assert sum(isinstance(each, Define) for each in client.pair.server.received) == 1
