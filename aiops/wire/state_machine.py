"""The states of a connection: which message is legal when. docs/wire.md has it in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["client", "server"]

_ASK = {
    *("define", "describe", "push", "again", "fetch", "fetch_rows", "push_rows", "stats", "ping"),
    *("pong", "meet", "share", "release"),
}
_TELL = {"model", "ack", "params", "rows", "report", "pong", "ping", "round", "share"}

_ORDERS = (
    "begin",
    "expect",
    "use",
    "send",
    "send_coded",
    "hold",
    "forget",
    "count",
    "ping",
    "pong",
)
_REPORTS = ("arrived", "done", "counted", "portion", "ping", "pong", "error")

HANDSHAKE: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # state         who speaks    what it may say      and the state that follows
    "start": {
        "client": {"hello": "greeted", "greet": "met", "follow": "following", "lead": "leading"},
        "server": {"error": "closed"},
    },
    "greeted": {
        "client": {},
        "server": {"challenge": "challenged", "welcome": "open", "error": "closed"},
    },
    "challenged": {"client": {"prove": "proved"}, "server": {"error": "closed"}},
    "proved": {"client": {}, "server": {"welcome": "open", "error": "closed"}},
    "open": {
        "client": {**dict.fromkeys(_ASK, "open"), "leave": "left"},
        "server": {**dict.fromkeys(_TELL, "open"), "error": "open"},
    },
    "left": {
        "client": {"pong": "left"},
        "server": {**dict.fromkeys(_TELL, "left"), "error": "left"},
    },
    # at a follower: a client of the lead's
    "following": {
        "client": {},
        "server": {"challenge": "following, challenged", "attached": "branch", "error": "closed"},
    },
    "following, challenged": {
        "client": {"prove": "following, proved"},
        "server": {"error": "closed"},
    },
    "following, proved": {"client": {}, "server": {"attached": "branch", "error": "closed"}},
    "branch": {
        "client": dict.fromkeys(("portion", "ping", "pong"), "branch"),
        "server": dict.fromkeys(("portion", "ping", "pong", "error"), "branch"),
    },
    # at a follower: its lead
    "leading": {
        "client": {},
        "server": {"challenge": "leading, challenged", "attached": "led", "error": "closed"},
    },
    "leading, challenged": {
        "client": {"prove": "leading, proved"},
        "server": {"error": "closed"},
    },
    "leading, proved": {"client": {}, "server": {"attached": "led", "error": "closed"}},
    "led": {
        "client": {**dict.fromkeys(_ORDERS, "led"), "leave": "relieved"},
        "server": dict.fromkeys(_REPORTS, "led"),
    },
    "relieved": {"client": {}, "server": dict.fromkeys(_REPORTS, "relieved")},
    # between the workers of a round: the client is the one that connects, the server the next
    "met": {"client": {}, "server": {"greet": "paired", "error": "closed"}},
    "paired": {"client": {"chunk": "paired"}, "server": {}},
    "closed": {"client": {}, "server": {}},
}

KNOWN = ("open", "left", "branch", "led", "relieved")
"""The states of those who have introduced themselves."""
