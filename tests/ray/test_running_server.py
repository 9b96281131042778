"""Finding a server by its name: what its actors say, or no longer say, decides; Ray is not run."""

from __future__ import annotations

from typing import Any

import pytest

ray = pytest.importorskip("ray")

from aiops.errors import AiopsError, UsageError  # noqa: E402
from aiops.ray import running_server  # noqa: E402
from aiops.ray.servers import ServerAccess  # noqa: E402
from aiops.serving.config import Config  # noqa: E402

ACCESS = ServerAccess("127.0.0.2", 20000, "secret", "node")
DIED = ray.exceptions.ActorDiedError()
WAITS = object()
"""In place of an answer: there is none in time."""


class Actor:
    """An actor each of whose calls has the same end."""

    def __init__(self, end: Any, **others: Any) -> None:
        self._end, self._others = end, others

    def __getattr__(self, name: str) -> Any:
        return Call(self._others.get(name, self._end))


class Ends(Actor):
    """One that serves when it is asked at first, and is lost then."""

    def __init__(self, end: Any) -> None:
        super().__init__(end)
        self._served = iter([True])

    def __getattr__(self, name: str) -> Any:
        if name == "serves":
            return Call(next(self._served, WAITS))
        return super().__getattr__(name)


class Call:
    """A method of an actor; a call of it is a reference, which `wait` and `get` understand."""

    def __init__(self, end: Any) -> None:
        self.end = end

    def remote(self) -> Call:
        return Call(self.end)


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Actor]:
    named: dict[str, Actor] = {}

    def get_actor(name: str, namespace: str) -> Actor:
        if name not in named:
            raise ValueError(name)
        return named[name]

    def wait(asked: list[Any], num_returns: int, timeout: float) -> Any:
        there = [each for each in asked if each.end is not WAITS][:num_returns]
        return there, [each for each in asked if each not in there]

    def get(reference: Any, timeout: float | None = None) -> Any:
        if reference.end is WAITS:
            raise ray.exceptions.GetTimeoutError
        if isinstance(reference.end, Exception):
            raise reference.end
        return reference.end

    for function in (get_actor, wait, get):
        monkeypatch.setattr(running_server.ray, function.__name__, function)
    return named


def test_a_server_is_found(actors: dict[str, Actor]) -> None:
    assert running_server.find("run") is None
    actors["run/0"] = Actor(ACCESS, config=Config(shards=2))
    found = running_server.find("run")
    assert found is not None
    assert (found.url, found.servers) == ("aiops://127.0.0.2:20000", 2)


@pytest.mark.parametrize("standby", [False, True])
def test_one_whose_actors_were_killed_is_none(actors: dict[str, Actor], standby: bool) -> None:
    """Ray may know their names yet: `stop` returns as soon as Ray was told to kill them."""
    actors["run/0"] = Actor(DIED)
    if standby:
        actors["run/standby"] = Actor(DIED)
    assert running_server.find("run") is None
    with pytest.raises(UsageError, match="no server runs under the name 'run'"):
        running_server.server("run")


@pytest.mark.parametrize(
    ("other", "error", "text"),
    [
        (WAITS, UsageError, "has not answered in"),  # it may be waiting for a node
        (AiopsError("it cannot start"), AiopsError, "it cannot start"),
        (ray.exceptions.ActorUnavailableError("away", None), ray.exceptions.RayError, "away"),
    ],
)
@pytest.mark.parametrize("died", [0, 1])
def test_a_pair_of_which_one_is_left_is_one(
    actors: dict[str, Actor], other: Any, error: type[Exception], text: str, died: int
) -> None:
    names = ["run/0", "run/standby"]
    actors[names[died]], actors[names[1 - died]] = Actor(DIED), Actor(other)
    with pytest.raises(error, match=text):
        running_server.find("run")


@pytest.mark.parametrize("lost", [WAITS, DIED])
def test_where_a_server_is_whose_node_is_lost_as_it_is_asked(
    actors: dict[str, Actor], monkeypatch: pytest.MonkeyPatch, lost: Any
) -> None:
    """Its actor waits for another node, for however long: its standby is asked, which serves."""
    monkeypatch.setattr(running_server.time, "sleep", lambda seconds: None)
    moved = ServerAccess("127.0.0.3", 20001, "secret", "another")
    config = Config()
    actors["run/0"] = Actor(ACCESS, config=config, serves=False)
    actors["run/standby"] = Actor(moved, config=config, serves=True)
    found = running_server.find("run")
    assert found is not None
    assert found.is_pair
    found.heads[0], found.heads[1] = Ends(lost), actors["run/standby"]
    assert found.node == "another"
