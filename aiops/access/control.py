"""Decide what each connection of a server may do, by the token that it was admitted with.

The acceptor tells it of connections and of the token file, and asks it. Without tokens it allows
everything: such a server listens on loopback only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aiops.access.quotas import Meter, Quota
from aiops.access.tokens import AccessToken, TokenRole, TokenTable
from aiops.common.sent_away import SentAway
from aiops.errors import Kicked, Refused, Unauthorised, Unavailable
from aiops.wire.messages import Hello
from aiops.wire.server_messages import Greeting, LeadHello
from aiops.wire.standby_messages import StandbyHello
from aiops.wire.token_keys import FindKeys, TokenKeys, is_of, token_id
from aiops.wire.traffic import Traffic

UNNAMED = "a client without a token"


@dataclass(slots=True)
class _Use:
    """The use of one token: its connections, and the number of refusals."""

    token: AccessToken
    peers: dict[int, TokenRole] = field(default_factory=dict)  # with what each needs
    refused: int = 0  # connections and requests
    quota: Quota = field(default_factory=Quota)


class AccessControl:
    """The tokens of one server, and the connections that each has admitted.

    Parameters
    ----------
    table
        The tokens; None: none is asked for, and everything is allowed.
    clock
        Seconds since 1970.
    """

    def __init__(self, table: TokenTable | None, clock: Callable[[], float]) -> None:
        self._table, self._clock = table, clock
        self._uses: dict[bytes, _Use] = {}  # by the token's id: a rotated token is another one
        self._by_peer: dict[int, _Use] = {}
        self._sent_away = SentAway()

    @property
    def find(self) -> FindKeys | None:
        """Finds the keys of the token of an id; None: no token is asked for."""
        return None if self._table is None else self._find

    def _find(self, key: bytes) -> TokenKeys | None:
        assert self._table is not None, "it is asked for tokens only if there is a table"
        token = self._table.of_id(key)
        return None if token is None else token.keys

    def forbids(self, hello: Greeting, key: bytes) -> Refused | None:
        """Return the reason for which the holder of a token may not connect so, or None."""
        if isinstance(hello, Hello) and hello.client in self._sent_away:
            return Kicked(self._sent_away[hello.client])
        if self._table is None:
            return None
        token = self._table.of_id(key)
        if token is None:  # it was revoked since it was proved
            return Unauthorised("this token was revoked: get another one")
        use, needed = self._use(token), _needed(hello)
        fault: Refused | None = None
        if token.expired(self._clock()):
            fault = Unauthorised(f"the token {token.name!r} has expired: get another one")
        elif token.role < needed:
            fault = _too_little(token, needed, f"connect as a {hello.role}")
        elif len(use.peers) >= (token.connections or len(use.peers) + 1):
            most = token.connections
            fault = Unavailable(f"the token {token.name!r} has its {most} connections already")
        use.refused += fault is not None
        return fault

    def admit(self, peer: int, hello: Greeting, key: bytes) -> str:
        """Note a connection that was admitted; return the name of its token, or an empty text."""
        token = None if self._table is None else self._table.of_id(key)
        if token is None:
            return ""
        use = self._by_peer[peer] = self._use(token)
        use.peers[peer] = _needed(hello)
        return token.name

    def send_away(self, client: str, why: Kicked) -> None:
        """Admit a client of this id no more; it was told why, and may have missed that."""
        self._sent_away.note(client, str(why))

    def meter(self, peer: int, traffic: Traffic, now: float) -> Meter | None:
        """Return what counts a connection's traffic; None: its token has no quota of any.

        ``now``: the time by the clock with which it is read, in seconds.
        """
        use = self._by_peer.get(peer)
        if use is None:
            return None
        use.quota.limit(use.token, now)
        return Meter(use.quota, traffic) if use.quota.bounded else None

    def left(self, peer: int) -> None:
        """Note that a connection is gone."""
        use = self._by_peer.pop(peer, None)
        if use is not None:
            use.peers.pop(peer, None)

    def name_of(self, peer: int) -> str:
        """Return the name of a connection's token, for the log."""
        use = self._by_peer.get(peer)
        return UNNAMED if use is None else f"token {use.token.name!r}"

    def forbids_request(self, peer: int) -> Refused | None:
        """Return the reason for which a connection may not direct the server, or None."""
        if self._table is None:
            return None
        use = self._by_peer.get(peer)
        if use is None:
            return Unauthorised("this takes a token with the role 'admin'")
        if use.token.role >= TokenRole.ADMIN:
            return None
        use.refused += 1
        return _too_little(use.token, TokenRole.ADMIN, "direct the server")

    def administrator(self, given: str) -> str:
        """Return the name of a token that is shown as it is, and may direct the server.

        Raises
        ------
        Unauthorised
            When there is no such token, or it may not; without tokens none may.
        """
        token = None if self._table is None else self._table.of_id(token_id(given))
        if token is None or not is_of(given, token.keys):
            raise Unauthorised("there is no such token")
        if token.expired(self._clock()):
            raise Unauthorised(f"the token {token.name!r} has expired: get another one")
        if token.role < TokenRole.ADMIN:
            self._use(token).refused += 1
            raise _too_little(token, TokenRole.ADMIN, "direct the server")
        return token.name

    # ------------------------------------------------------------ changes

    def change(self, table: TokenTable) -> list[str]:
        """Take the tokens that there are from here on; return what has changed, for the log."""
        before, self._table = self._table or TokenTable(), table
        said = []
        for token in table:
            known = before.named(token.name)
            if known is None:
                said.append(f"token {token.name!r} is new: {token.role.word}")
            elif known != token:
                said.append(f"token {token.name!r} has changed: {token.role.word}")
            use = self._uses.get(token.keys.id)
            if use is not None and _same(use.token, token):
                use.token = token
        said += [
            f"token {token.name!r} is revoked" for token in before if not table.named(token.name)
        ]
        gone = [id for id, use in self._uses.items() if not (use.peers or table.of_id(id))]
        for id in gone:
            del self._uses[id]
        return said

    def ended(self) -> list[tuple[int, Refused]]:
        """Return the connections whose token is of use no more, each with the reason."""
        if self._table is None:
            return []
        now, found = self._clock(), list[tuple[int, Refused]]()
        for use in self._uses.values():
            name, present = use.token.name, self._table.of_id(use.token.keys.id)
            why: Refused | None = None
            if present is None or not _same(present, use.token):
                why = Unauthorised(f"the token {name!r} was revoked: get another one")
            elif present.expired(now):
                why = Unauthorised(f"the token {name!r} has expired: get another one")
            for peer, needed in use.peers.items():
                fault = why
                if fault is None and present is not None and present.role < needed:
                    fault = _too_little(present, needed, "go on with this connection")
                if fault is not None:
                    found.append((peer, fault))
        return found

    # ------------------------------------------------------------ what it tells

    def report(self) -> list[dict[str, Any]]:
        """Return a line for each token: name, role, expiry, use, refusals, quotas."""
        now, found = self._clock(), []
        for token in self._table or ():
            use = self._uses.get(token.keys.id)
            found.append(
                {
                    "name": token.name,
                    "role": token.role.word,
                    "expires": token.expires,
                    "expired": token.expired(now),
                    "connections": 0 if use is None else len(use.peers),
                    "refused": 0 if use is None else use.refused,
                    "bytes_per_second": token.bytes_per_second,
                    "requests_per_second": token.requests_per_second,
                    "waiting": 0 if use is None else use.quota.waiting,
                    "waited": 0.0 if use is None else round(use.quota.waited, 3),
                }
            )
        return found

    def _use(self, token: AccessToken) -> _Use:
        return self._uses.setdefault(token.keys.id, _Use(token))


def _same(one: AccessToken, other: AccessToken) -> bool:
    """Return whether two entries are of one token and one holder."""
    return one.keys == other.keys and one.name == other.name


def _needed(hello: Greeting) -> TokenRole:
    """Return the role that a greeting takes."""
    if isinstance(hello, LeadHello | StandbyHello):
        return TokenRole.ADMIN
    if isinstance(hello, Hello) and hello.role == "worker":
        return TokenRole.TRAIN
    return TokenRole.OBSERVE


def _too_little(token: AccessToken, needed: TokenRole, what: str) -> Unauthorised:
    return Unauthorised(
        f"the token {token.name!r} has the role {token.role.word!r}, and to {what} takes"
        f" {needed.word!r}: use another token, or have its role changed"
    )
