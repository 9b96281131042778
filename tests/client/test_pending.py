"""Requests that are given up, without a session or a server."""

from __future__ import annotations

import pytest

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.outbox import Outbox
from aiops.client.pending import APPLIED, PendingRequests, given_up
from aiops.client.request_kinds import Request
from aiops.client.server_info import ServerInfo
from aiops.errors import AiopsError, ConnectionLost, Refused, Superseded, Unavailable
from aiops.kernels.parallel import serial_map
from tests.rows import each_row

FULL = Unavailable("it is full")
GONE = ConnectionLost("it is gone")


class Asked(Request):
    """A push, or not."""

    def __init__(
        self, *, pushes: bool = True, attempted: bool = False, refusal: Unavailable | None = None
    ) -> None:
        super().__init__()
        self.pushes = pushes  # type: ignore[misc]
        self.attempted, self.refusal = attempted, refusal


class TestGivenUp:
    @each_row(
        "request_",
        [Asked(), Asked(pushes=False, attempted=True), Asked(attempted=True, refusal=FULL)],
        ids=["not sent", "no push", "refused"],
    )
    def test_what_the_server_has_not_applied_is_refused(self, request_: Request) -> None:
        assert given_up(request_, FULL) is FULL

    @pytest.mark.parametrize("refusal", [None, Unavailable("part", **{APPLIED: True})])
    def test_what_it_may_have_applied_is_not(self, refusal: Unavailable | None) -> None:
        found = given_up(Asked(attempted=True, refusal=refusal), FULL)
        assert isinstance(found, ConnectionLost)
        assert not isinstance(found, Refused)
        assert str(found).startswith("it is full; whether it has applied the push")

    def test_a_server_that_refused_and_is_gone_is_named_with_its_refusal(self) -> None:
        found = given_up(Asked(attempted=True, refusal=FULL), GONE)
        assert isinstance(found, Unavailable)
        assert str(found) == "it is full; since then it cannot be reached (it is gone)"

    @pytest.mark.parametrize("error", [GONE, Superseded("another has the run")])
    def test_any_other_error_is_that_of_the_request(self, error: AiopsError) -> None:
        assert given_up(Asked(attempted=True), error) is error


def pending(*requests: Request) -> PendingRequests:
    ledger = Ledger(own=True)
    info = ServerInfo("aiops://here:1", "me", "worker", ledger, serial_map)
    found = PendingRequests(info, Outbox(serial_map), ledger, serial_map)
    found.by_id = dict(enumerate(requests, 1))
    return found


def test_all_are_given_the_error_as_it_is_of_each() -> None:
    sent, refused = Asked(attempted=True), Asked(attempted=True, refusal=FULL)
    found = pending(sent, refused)
    found.fail(GONE)
    assert found.by_id == {}
    assert sent.error is GONE
    assert isinstance(refused.error, Unavailable)


def test_those_that_were_refused_are_given_up_alone() -> None:
    sent, refused = Asked(attempted=True), Asked(attempted=True, refusal=FULL)
    found = pending(sent, refused)
    found.refused = FULL
    found.reject_refused(FULL)
    assert (found.by_id, found.refused) == ({1: sent}, None)
    assert (sent.done, refused.error) == (False, FULL)
