"""The messages by which an administrator directs a server, and their answer.

See `aiops.wire.messages` for the form of the classes.
"""

from __future__ import annotations

from aiops.common.frozen import value
from aiops.wire.fields import Text, UInt
from aiops.wire.messages import Message

# ---------------------------------------------------------------- from an administrator


@value
class Kick(Message):
    """End the connections of the clients of this name, or of the worker whose number ``#7`` gives.

    They are told ``why``, and these clients are not welcomed again.
    """

    kind = "kick"
    client: Text
    why: Text


@value
class Pause(Message):
    """Take no pushes until `resume`: they are answered with `unavailable`, and ``why``."""

    kind = "pause"
    why: Text


@value
class Resume(Message):
    """Take pushes again."""

    kind = "resume"


@value
class TakeSnapshot(Message):
    """Take a snapshot of the state that there is now. It is answered when that is on the disk."""

    kind = "take_snapshot"


@value
class Drain(Message):
    """End the server as SIGTERM does: it takes no more pushes, answers, saves, and stops."""

    kind = "drain"


@value
class RollbackTo(Message):
    """Go back to the newest snapshot of this version that the server keeps.

    What followed is lost. The server ends all connections, and welcomes clients in its next
    generation.
    """

    kind = "rollback_to"
    version: UInt


# ---------------------------------------------------------------- from a server


@value
class Done(Message):
    """The request was carried out."""

    kind = "done"
    version: UInt
    count: UInt = 0


ADMIN_REQUESTS = (Kick, Pause, Resume, TakeSnapshot, Drain, RollbackTo)
"""The requests that direct a server: they take a token with the role ``admin``."""
