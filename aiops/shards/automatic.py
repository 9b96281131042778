"""Choose the number of servers of a model: ``--shards auto``."""

from __future__ import annotations

from aiops.common import formatting
from aiops.common.frozen import value
from aiops.errors import UsageError

LEAST = 8 << 20
"""Bytes below which a server's part is not worth its messages."""

MOST = 4
"""Servers on one machine: no more have been measured."""

ALONE = 527_000_000
"""Bytes per second in each direction that one server alone has made, beside its four workers on two
processors (16 MiB): a link that is not faster is filled by one server."""


@value
class ShardChoice:
    """A number of servers, and why it is that.

    Attributes
    ----------
    shards
        The number, at least 1.
    why
        For a person: what it comes from.
    """

    shards: int
    why: str


def choose_shards(
    nbytes: int | None,
    processors: int,
    hosts: int = 0,
    *,
    held: int | None = None,
    link: int | None = None,
) -> ShardChoice:
    """Return the number of servers that a model is to be spread over.

    The rule, with the figures of docs/results that it stands on:

    * A state is of a number of servers, and goes on with that.
    * Each server has 8 MiB at least. Four workers on two processors made 1.38 times the exchanges
      of one server with two that had 8 MiB each, and 0.44 times with two that had 512 KiB.
    * Servers on one machine are not more than its processors, nor more than 4. On two processors
      four servers were slower than two; more than four have not been measured. Workers on the same
      machine are not subtracted: they wait while a server works, and those figures are with them.
    * Servers on one machine share its link. One of them makes 527 MB/s in each direction, so there
      are not more than it takes to fill the link: one up to 4.2 Gbit/s, three at 10. A link whose
      speed is not known is no limit.
    * Servers on other machines have their own processors and links, so all that are named are used,
      as far as each gets its 8 MiB. Where the size is not known yet, all of them are reached, and
      a small model lies on the first ones (``--shard-bytes``).

    On several machines the speed of the links is no argument: each server adds a link. Over
    1 Gbit/s each, two made 1.78 and four 3.41 times the exchanges of one at 256 MiB. Where links
    are not the limit, no figure says that a small part pays over a slow one.

    Parameters
    ----------
    nbytes
        Bytes of the model's parameters; None: not known.
    processors
        Those that this process may use.
    hosts
        Followers that are named, on whatever machines; 0: they would be started on this one.
    held
        The number of servers of the state that is there; None: there is none.
    link
        Bytes per second that this machine's link carries each way; None: no limit is known.

    Raises
    ------
    UsageError
        When nothing tells the size.

    >>> choose_shards(64 << 20, 2)
    ShardChoice(shards=2, why='2 servers for 67.1 MB, on 2 processors')
    >>> choose_shards(64 << 20, 2, link=125_000_000)
    ShardChoice(shards=1, why='1 server for 67.1 MB, which fills the link of 125 MB/s')
    """
    if held is not None:
        return ShardChoice(held, f"{_servers(held)}, as in the state")
    if nbytes is None and not hosts:
        raise UsageError(
            "--shards auto needs the size of the model before the first worker defines it: give"
            " --model-size BYTES, or --init FILE, or the number of shards"
        )
    room = 1 + hosts if hosts else min(processors, MOST)
    places = (
        f"{1 + hosts} named"
        if hosts
        else f"on {processors} processor{'s' if processors > 1 else ''}"
    )
    if nbytes is None:
        why = f"{_servers(room)}, all that are named: the size is not known yet"
        return ShardChoice(room, why)
    shards = max(1, min(room, nbytes // LEAST))
    size = formatting.nbytes(nbytes)
    fill = shards if hosts or link is None else max(1, -(-link // ALONE))
    if fill < shards:
        shards, plural = fill, "" if fill > 1 else "s"
        places = f"which fill{plural} the link of {formatting.nbytes(link or 0)}/s"
    return ShardChoice(shards, f"{_servers(shards)} for {size}, {places}")


def _servers(number: int) -> str:
    return f"{number} server{'s' if number > 1 else ''}"
