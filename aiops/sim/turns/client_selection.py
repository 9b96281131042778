"""Rules that select the client of each turn, as FRED's dispatcher takes them.

A rule is an endless stream of clients' numbers that depends on its seed alone. A client that has to
wait when its turn comes is passed over, so that the stream is the same under every algorithm.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from operator import add, itemgetter, mul
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any, Protocol, runtime_checkable

import numpy as np

from aiops.common.load import imported
from aiops.errors import UsageError, nearest
from aiops.state.plain import pack, unpack

Change = Callable[[float], float]

_AT_ONCE = 4096  # clients drawn at a time


class Selection(Protocol):
    """A selection rule."""

    def __next__(self) -> int:
        """Return the next client's number, from 0."""


@runtime_checkable
class KeptSelection(Selection, Protocol):
    """A selection rule that a checkpoint can keep."""

    def state(self) -> Mapping[str, Any]:
        """Return what later turns depend on, as plain values (`aiops.state.plain`)."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, on a rule made alike."""


class Uniform:
    """Every client with the same probability, independently of earlier turns.

    Parameters
    ----------
    clients
        The number of clients.
    seed
        Of the stream.
    """

    def __init__(self, clients: int, seed: int) -> None:
        self._clients, self._random = clients, np.random.default_rng([seed, 1])
        self._drawn: list[int] = []

    def __next__(self) -> int:
        if not self._drawn:
            drawn = self._random.integers(self._clients, size=_AT_ONCE)
            self._drawn = drawn.tolist()[::-1]
        return self._drawn.pop()

    def state(self) -> dict[str, Any]:
        """Return the stream's state, and what is drawn of it."""
        random = self._random.bit_generator.state
        return {"random": random, "drawn": np.array(self._drawn, np.int64)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._random.bit_generator.state = state["random"]
        self._drawn = _checked(state["drawn"].tolist(), self._clients, "the checkpoint")


class RoundRobin:
    """One after the other.

    Parameters
    ----------
    clients
        The number of clients.
    """

    def __init__(self, clients: int) -> None:
        self._clients, self._last = clients, -1

    def __next__(self) -> int:
        self._last = (self._last + 1) % self._clients
        return self._last

    def state(self) -> dict[str, Any]:
        """Return the last client."""
        return {"last": self._last}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self._last = state["last"]


class Softmax:
    """With probabilities proportional to exp(priority); being selected changes one's priority.

    FRED's rule (Odena, "Faster Asynchronous SGD", 2016, section 3). A priority that falls makes
    turns more even than `Uniform`, one that rises has few clients do most of the work.

    Parameters
    ----------
    clients
        The number of clients.
    seed
        Of the stream.
    change
        A client's priority, before it was selected, to that afterwards.
    start
        Everyone's priority at first.
    """

    def __init__(self, clients: int, seed: int, change: Change, start: float = 0.0) -> None:
        self.priorities = np.full(clients, float(start))
        self._change, self._random = change, np.random.default_rng([seed, 1])

    def __next__(self) -> int:
        weights = np.exp(self.priorities - self.priorities.max())
        total = np.cumsum(weights)
        client = int(np.searchsorted(total, self._random.random() * total[-1], side="right"))
        client = min(client, len(weights) - 1)
        changed = float(self._change(float(self.priorities[client])))
        if not math.isfinite(changed):
            raise UsageError(f"client {client}'s priority has become {changed}: keep it finite")
        self.priorities[client] = changed
        return client

    def state(self) -> dict[str, Any]:
        """Return the priorities, and the stream's state.

        Raises
        ------
        UsageError
            When ``change`` may have a state of its own.
        """
        if not _is_pure(self._change):
            raise UsageError(
                "softmax: a checkpoint cannot keep what its change of a priority remembers, a"
                f" {type(self._change).__qualname__}: give a function of the priority alone"
            )
        random = self._random.bit_generator.state
        return {"priorities": self.priorities.copy(), "random": random}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        self.priorities[:] = state["priorities"]
        self._random.bit_generator.state = state["random"]


class Paced:
    """In the order in which clients finish that always compute, some of them slower than others.

    The time of each mini-batch is drawn by itself. At the start each client is at a drawn point of
    its first mini-batch. Clients that wait for each other begin later than this order assumes.

    Parameters
    ----------
    clients
        The number of clients.
    seed
        Of the stream.
    times
        How many times as long the slow ones take.
    slow
        How many are slow, from client 0.
    sigma
        Standard deviation of the times' logarithm.
    """

    def __init__(
        self, clients: int, seed: int, times: float, slow: int = 1, sigma: float = 0.1
    ) -> None:
        self._usual = [times if client < slow else 1.0 for client in range(clients)]
        self._sigma, self._random = sigma, np.random.default_rng([seed, 1])
        begun = self._random.random(clients)
        self._ends = [
            (usual * float(share), client)
            for client, (usual, share) in enumerate(zip(self._usual, begun, strict=True))
        ]
        heapq.heapify(self._ends)

    def __next__(self) -> int:
        now, client = self._ends[0]
        spread = math.exp(self._sigma * self._random.standard_normal())
        heapq.heapreplace(self._ends, (now + self._usual[client] * spread, client))
        return client

    def state(self) -> dict[str, Any]:
        """Return when each client finishes, and the stream's state."""
        ends = np.array([end for end, _client in sorted(self._ends, key=itemgetter(1))])
        return {"ends": ends, "random": self._random.bit_generator.state}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        ends = state["ends"].tolist()
        self._ends = [(end, client) for client, end in enumerate(ends)]
        heapq.heapify(self._ends)
        self._random.bit_generator.state = state["random"]


class RecordedSelection:
    """The clients of a record, in its order.

    Parameters
    ----------
    clients
        The number of clients.
    numbers
        The clients' numbers, in the order of their turns.
    source
        The name of the record, for errors.
    """

    def __init__(self, clients: int, numbers: Iterable[int], source: str = "the record") -> None:
        self._clients, self._source, self._turn = clients, source, 0
        self._numbers = _checked(list(numbers), clients, source)

    def __next__(self) -> int:
        if self._turn == len(self._numbers):
            raise UsageError(
                f"{self._source} ends after {self._turn} turns: record more, or run fewer"
                " iterations (a client that waits is passed over)"
            )
        self._turn += 1
        return self._numbers[self._turn - 1]

    def state(self) -> dict[str, Any]:
        """Return the record, and how many of its turns were taken."""
        return {"numbers": np.array(self._numbers, np.int64), "turn": self._turn}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue with the record that `state` returned."""
        self._numbers = _checked(state["numbers"].tolist(), self._clients, self._source)
        self._turn = state["turn"]


class RecordingSelection:
    """Another rule, and a record of the clients that it selects (`RecordedSelection`).

    Parameters
    ----------
    rule
        The other rule; a checkpoint keeps that one.

    Attributes
    ----------
    numbers
        The clients so far, in order. They include clients that were passed over because they
        waited, and the next few, whose gradients are computed ahead.
    """

    def __init__(self, rule: Selection) -> None:
        self.rule, self.numbers = rule, array("I")

    def __next__(self) -> int:
        client = next(self.rule)
        self.numbers.append(client)
        return client

    def write(self, path: Path) -> None:
        """Write a record that ``recorded:FILE`` reads: one number a line.

        Raises
        ------
        UsageError
            When it cannot be written.
        """
        try:
            path.write_text("".join(f"{number}\n" for number in self.numbers))
        except OSError as error:
            raise UsageError(
                f"cannot write the record to {path}: {error.strerror}", output=str(path)
            ) from None


def selection(text: str, clients: int, seed: int) -> Selection:
    """Return the rule that a text names.

    ``uniform``, ``round-robin``, ``recorded:FILE`` (numbers, with white space between),
    ``paced:times=3`` (client 0 takes three times as long as the others; ``slow=2``: clients 0 and
    1; ``sigma=0``: always as long), or ``softmax:add=-1``, ``softmax:times=0.5`` and
    ``softmax:change=package.module:function``, which change the priority of a client when it is
    selected (``start`` is every client's first priority, 0 by default).

    >>> rule = selection("round-robin", 3, seed=0)
    >>> [next(rule) for _ in range(4)]
    [0, 1, 2, 0]

    Raises
    ------
    UsageError
        When there is no such rule, or it does not fit the number of clients.
    """
    name, _colon, rest = text.partition(":")
    if clients < 1:
        raise UsageError(f"{clients} clients: a simulation needs at least one")
    if name not in _RULES:
        raise UsageError(f"no selection rule is called {name!r}; {nearest(name, _RULES)}")
    return _RULES[name](rest, clients, seed)


def resumed(text: str, clients: int, seed: int) -> Selection:
    """Return the rule that a text names, to be restored: a record is not read from its file."""
    name, _colon, rest = text.partition(":")
    if name == "recorded":
        return RecordedSelection(clients, (), rest)
    return selection(text, clients, seed)


def rule_state(rule: Selection) -> list[Any]:
    """Return a rule's name and state, for `restore_rule`.

    Raises
    ------
    UsageError
        When the rule, or what it keeps, cannot be written.
    """
    if isinstance(rule, RecordingSelection):
        rule = rule.rule
    name = _name_of(rule)
    if not isinstance(rule, KeptSelection):
        raise UsageError(
            f"the selection rule {name} cannot be kept in a checkpoint: give it state() and"
            " restore()"
        )
    try:
        return [name, unpack(pack(dict(rule.state())), name)]
    except UsageError as error:
        raise UsageError(f"the selection rule {name} cannot be kept: {error}") from None


def restore_rule(rule: Selection, kept: Iterable[Any]) -> None:
    """Have a rule continue from what `rule_state` returned of one made alike.

    Raises
    ------
    UsageError
        When it is another rule.
    """
    name, state = kept
    if name != _name_of(rule) or not isinstance(rule, KeptSelection):
        raise UsageError(
            f"the turns of this checkpoint were selected by {name!s:.80}, and {_name_of(rule)}"
            " cannot go on with them: give Run.load the same rule as selection"
        )
    rule.restore(state)


def _name_of(rule: Selection) -> str:
    return f"{type(rule).__module__}:{type(rule).__qualname__}"


def _checked(numbers: list[int], clients: int, source: str) -> list[int]:
    """Return clients' numbers, if they are."""
    wrong = [number for number in numbers if not 0 <= number < clients]
    if wrong:
        raise UsageError(
            f"{source} selects client {wrong[0]}, but there are {clients}: numbers go from 0 to"
            f" {clients - 1}"
        )
    return numbers


def _is_pure(thing: object) -> bool:
    """Return whether a value, or a function with all that it holds, cannot change."""
    if isinstance(thing, partial):
        return all(map(_is_pure, (thing.func, *thing.args, *thing.keywords.values())))
    if isinstance(thing, FunctionType):
        cells = [cell.cell_contents for cell in thing.__closure__ or ()]
        return all(_is_pure(each) for each in cells if each is not thing)
    return isinstance(thing, int | float | str | bytes | type | BuiltinFunctionType | None)


def _softmax(rest: str, clients: int, seed: int) -> Selection:
    settings = dict(_settings(rest))
    start = settings.pop("start", "0")
    if len(settings) != 1:
        raise UsageError(
            f"softmax:{rest}: give the change of a selected client's priority, as add=-1,"
            " times=0.5 or change=package.module:function"
        )
    ((key, value),) = settings.items()
    change: Change
    if key == "change":
        change = imported(value, f"softmax:{rest}")
        if not callable(change):
            raise UsageError(f"softmax:{rest}: that is not a function; name one")
    elif key in _OPERATORS:
        change = partial(_OPERATORS[key], _number(key, value))
    else:
        known = nearest(key, ("change", *_OPERATORS))
        raise UsageError(f"softmax has no setting {key!r}; {known}")
    return Softmax(clients, seed, change, _number("start", start))


_OPERATORS = {"add": add, "times": mul}


def _paced(rest: str, clients: int, seed: int) -> Selection:
    given = {key: _number(key, value) for key, value in _settings(rest)}
    unknown = [key for key in given if key not in _PACED]
    if unknown:
        raise UsageError(f"paced has no setting {unknown[0]!r}; {nearest(unknown[0], _PACED)}")
    times, slow, sigma = ({**_PACED, **given}[key] for key in _PACED)
    if not 0 < times <= _SLOWEST or not 0 <= sigma <= 1 or slow not in range(clients + 1):
        raise UsageError(
            f"paced:{rest}: times is above 0 and up to {_SLOWEST:,}, sigma from 0 to 1, and slow"
            f" one of 0 to {clients}, the number of clients"
        )
    return Paced(clients, seed, times, int(slow), sigma)


_PACED = {"times": 1.0, "slow": 1.0, "sigma": 0.1}
_SLOWEST = 1_000_000


def _settings(text: str) -> Iterator[tuple[str, str]]:
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"{item!r} in a selection rule: write key=number")
        yield key.strip(), value


def _number(key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UsageError(f"'{key}={value}' in a selection rule: write key=number")
    return number


def _recorded(rest: str, clients: int, _seed: int) -> Selection:
    path = Path(rest)
    try:
        numbers = [int(word) for word in path.read_text().split()]
    except OSError as error:
        raise UsageError(f"recorded:{rest}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"recorded:{rest}: {error}: clients' numbers belong there") from None
    return RecordedSelection(clients, numbers, str(path))


def _plain(make: Callable[[int, int], Selection]) -> Callable[[str, int, int], Selection]:
    def made(rest: str, clients: int, seed: int) -> Selection:
        if rest:
            raise UsageError(f"this selection rule has no settings, and was given {rest!r}")
        return make(clients, seed)

    return made


_RULES: Mapping[str, Callable[[str, int, int], Selection]] = {
    "uniform": _plain(Uniform),
    "round-robin": _plain(lambda clients, _seed: RoundRobin(clients)),
    "softmax": _softmax,
    "paced": _paced,
    "recorded": _recorded,
}
