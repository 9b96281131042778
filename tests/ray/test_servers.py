"""The standby of a pair that watches its primary, without a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aiops.errors import AiopsError

pytest.importorskip("ray")

import ray

from aiops.ray import servers
from aiops.ray.servers import ServerAccess, ServerActor

PRIMARY = ServerAccess("10.0.0.1", 7171, "token", "node-1")


class Partner:
    """The other actor, whose address is asked for."""

    access = property(lambda self: self)

    def remote(self) -> str:
        return "asked"


def watching(
    monkeypatch: pytest.MonkeyPatch, outcomes: Iterator[Exception | None], *, answers: bool
) -> list[int]:
    """Have a standby watch a primary that is gone; return what counts its attempts."""
    attempts = list[int]()

    class Standby(ServerActor):
        def __init__(self) -> None:
            self._partner, self._primary = Partner(), PRIMARY
            self._ending = self._replicated = False

        def take_over(self) -> Any:
            attempts.append(1)
            error = next(outcomes)
            if error is not None:
                raise error
            self._primary = None

    def get(_asked: object) -> None:
        raise ray.exceptions.RayActorError

    monkeypatch.setattr(servers.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(servers, "node_is_alive", lambda _node: answers)
    monkeypatch.setattr(servers, "_is_replicated", lambda _primary: True)
    monkeypatch.setattr(ray, "wait", lambda asked, timeout: (asked if answers else [], []))
    monkeypatch.setattr(ray, "get", get)
    Standby()._watch_primary()
    return attempts


@pytest.mark.parametrize("answers", [False, True], ids=["its node is dead", "its actor is dead"])
def test_a_standby_that_cannot_take_over_says_so_once_and_tries_again(
    answers: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    refused = AiopsError("the standby may lack updates")
    failed = ray.exceptions.RayError("for a moment")
    outcomes = iter([refused, refused, refused, failed, None])
    assert len(watching(monkeypatch, outcomes, answers=answers)) == 5
    assert capfd.readouterr().err.splitlines() == [
        "the standby does not take over: the standby may lack updates",
        "the standby does not take over: for a moment",
    ]
