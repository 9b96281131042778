"""Events for people, from two reports that follow each other: joined, lost, refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from aiops.dashboard.document import Report, text

FEW = 3
"""Names that one event lists; the rest are counted."""

_SINGLE = {
    "joined": "{} joined",
    "returned": "{} came back",
    "left": "{} left",
    "lost": "the connection to {} was lost",
}
_SEVERAL = {
    "joined": "{} clients joined: {}",
    "returned": "{} clients came back: {}",
    "left": "{} clients left: {}",
    "lost": "the connections to {} clients were lost: {}",
}


class Happening(NamedTuple):
    """An event: its kind, and a sentence."""

    kind: str
    text: str


Arrival = tuple[int, str, str]
"""A client that came or went: a number that rises, how (`_SINGLE`), and its name."""


def happened(
    before: Report | None, now: Report, arrivals: Sequence[Arrival], lost: int
) -> Iterator[Happening]:
    """Yield what has happened between two reports of a server.

    Parameters
    ----------
    before, now
        The reports; ``before`` is None at first.
    arrivals
        The clients that have come and gone since, the oldest first.
    lost
        How many of them are not listed.
    """
    yield from _arrivals(arrivals, lost)
    if before is None:
        return
    yield from _refused(before, now)
    yield from _version(before, now)
    yield from _ready(before, now)
    yield from _shards(before, now)
    for name in ("warnings", "file_errors"):
        known = set(before.get(name) or ())
        for sentence in now.get(name) or ():
            if sentence not in known:
                yield Happening("warning", text(sentence))
    quarantined = [set((each.get("filter") or {}).get("quarantined", ())) for each in (before, now)]
    for name in sorted(quarantined[1] - quarantined[0]):
        yield Happening("refused", text(f"{name} is quarantined: its pushes are not used"))
    for name in sorted(quarantined[0] - quarantined[1]):
        yield Happening("joined", text(f"{name} is quarantined no more"))


def _arrivals(arrivals: Sequence[Arrival], lost: int) -> Iterator[Happening]:
    """Yield runs of the same kind as one event each."""
    first = 0
    if lost:
        yield Happening("joined", f"{lost:,} more clients came or went")
    while first < len(arrivals):
        kind = arrivals[first][1]
        last = first
        while last < len(arrivals) and arrivals[last][1] == kind:
            last += 1
        names = [name for _number, _kind, name in arrivals[first:last]]
        if len(names) == 1:
            yield Happening(kind, text(_SINGLE[kind].format(names[0])))
        else:
            listed = ", ".join(names[:FEW]) + (", …" if len(names) > FEW else "")
            yield Happening(kind, text(_SEVERAL[kind].format(f"{len(names):,}", listed)))
        first = last


def _refused(before: Report, now: Report) -> Iterator[Happening]:
    counts: Mapping[str, int] = now.get("refused") or {}
    for code, count in counts.items():
        more = count - (before.get("refused") or {}).get(code, 0)
        if more > 0:
            pushes = "1 push was" if more == 1 else f"{more:,} pushes were"
            yield Happening("refused", f"{pushes} refused: {code}")


def _version(before: Report, now: Report) -> Iterator[Happening]:
    versions = [each.get("version", 0) for each in (before, now)]
    generations = [(each.get("state") or {}).get("generation") for each in (before, now)]
    if versions[1] < versions[0]:
        sentence = f"the model went back from version {versions[0]:,} to {versions[1]:,}"
        yield Happening("rolled back", sentence)
    elif generations[1] != generations[0] and None not in generations:
        yield Happening("rolled back", f"the server began again at version {versions[1]:,}")


def _ready(before: Report, now: Report) -> Iterator[Happening]:
    why = now.get("ready", "")
    if why != before.get("ready", ""):
        yield Happening("warning" if why else "ready", text(why or "the server takes pushes"))


def _shards(before: Report, now: Report) -> Iterator[Happening]:
    gone = [_gone(each) for each in (before, now)]
    for shard in sorted(gone[1] - gone[0]):
        yield Happening("lost", f"shard {shard} is lost")
    for shard in sorted(gone[0] - gone[1]):
        yield Happening("returned", f"shard {shard} is back")


def _gone(report: Mapping[str, Any]) -> set[int]:
    return {line["shard"] for line in report.get("shards") or () if line["gone"]}
