"""The states of a connection, and the messages that are legal in each (in words: docs/wire.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

Side: TypeAlias = Literal["client", "server"]

_REQUESTS = {
    *("define", "describe", "push", "reapply", "fetch", "fetch_rows", "push_rows", "stats"),
    *("ping", "pong", "log", "join_round", "settle_round", "take_task", "cover"),
    *("share", "release", "promote", "take_place", "fence"),
    *("kick", "pause", "resume", "take_snapshot", "drain", "rollback_to"),
}
_ANSWERS = {"model", "ack", "params", "rows", "report", "pong", "ping", "round", "share"} | {
    *("promoted", "place_given", "task", "settled", "done"),
}

_ORDERS = {
    *(
        "share_secret",
        "load_shard",
        "expect_push",
        "run_update",
        "send_params",
        "send_increments",
    ),
    *("hold_version", "finish_push", "note_history", "keep_sets", "roll_back", "count_traffic"),
    *("send_rows", "close_pushes", "send_away"),
    *("pace_clients", "promote", "ping", "pong"),
}
_REPORTS = {"push_arrived", "update_done", "traffic_counted", "shard_parts", "shard_state"} | {
    *("snapshot_saved", "budget_used", "stored_rows", "promoted", "ping", "pong", "error"),
}

HANDSHAKE: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    # state         sender         what it may send  and the state that follows
    "start": {
        "client": {
            "hello": "greeted",
            "shard_hello": "shard greeted",
            "lead_hello": "lead greeted",
            "standby_hello": "standby greeted",
            "ring_hello": "ring greeted",
            "relay_hello": "relay greeted",
        },
        "server": {"error": "closed"},
    },
    "greeted": {
        "client": {},
        "server": {"challenge": "challenged", "welcome": "open", "error": "closed"},
    },
    "challenged": {"client": {"prove": "proved"}, "server": {"error": "closed"}},
    "proved": {"client": {}, "server": {"welcome": "open", "error": "closed"}},
    "open": {
        "client": {**dict.fromkeys(_REQUESTS, "open"), "leave": "left"},
        "server": {**dict.fromkeys(_ANSWERS, "open"), "error": "open"},
    },
    "left": {
        "client": {"pong": "left"},
        "server": {**dict.fromkeys(_ANSWERS, "left"), "error": "left"},
    },
    # at a follower: a client of its lead
    "shard greeted": {
        "client": {},
        "server": {
            "challenge": "shard challenged",
            "shard_welcome": "shard open",
            "error": "closed",
        },
    },
    "shard challenged": {"client": {"prove": "shard proved"}, "server": {"error": "closed"}},
    "shard proved": {"client": {}, "server": {"shard_welcome": "shard open", "error": "closed"}},
    "shard open": {
        "client": dict.fromkeys(
            ("shard_parts", "fetch_rows", "push_rows", "ping", "pong", "share", "release"),
            "shard open",
        ),
        "server": {
            **dict.fromkeys(("shard_parts", "rows", "ping", "pong", "share"), "shard open"),
            "error": "shard open",
        },
    },
    # at a follower: its lead
    "lead greeted": {
        "client": {},
        "server": {"challenge": "lead challenged", "shard_welcome": "lead open", "error": "closed"},
    },
    "lead challenged": {"client": {"prove": "lead proved"}, "server": {"error": "closed"}},
    "lead proved": {"client": {}, "server": {"shard_welcome": "lead open", "error": "closed"}},
    "lead open": {
        "client": {**dict.fromkeys(_ORDERS, "lead open"), "leave": "lead left"},
        "server": dict.fromkeys(_REPORTS, "lead open"),
    },
    "lead left": {"client": {}, "server": dict.fromkeys(_REPORTS, "lead left")},
    # at a server that keeps its state: its standby
    "standby greeted": {
        "client": {},
        "server": {
            "challenge": "standby challenged",
            "standby_welcome": "standby open",
            "error": "closed",
        },
    },
    "standby challenged": {"client": {"prove": "standby proved"}, "server": {"error": "closed"}},
    "standby proved": {
        "client": {},
        "server": {"standby_welcome": "standby open", "error": "closed"},
    },
    "standby open": {
        "client": dict.fromkeys(("rows_kept", "ping", "pong"), "standby open"),
        "server": dict.fromkeys(
            ("snapshot_part", "journal_rows", "ping", "pong", "error"), "standby open"
        ),
    },
    # between the workers of a round: the client is the one that connects, the server the next
    "ring greeted": {"client": {}, "server": {"ring_hello": "ring open", "error": "closed"}},
    "ring open": {"client": {"ring_chunk": "ring open"}, "server": {}},
    # at a relay, and then through it: the worker that sends chunks says ring_hello first
    "relay greeted": {"client": {}, "server": {"challenge": "relay challenged", "error": "closed"}},
    "relay challenged": {"client": {"prove": "relay proved"}, "server": {"error": "closed"}},
    "relay proved": {"client": {}, "server": {"relay_ready": "relayed", "error": "closed"}},
    "relayed": {
        "client": {"ring_hello": "ring greeted"},
        "server": {"ring_hello": "ring called"},
    },
    "ring called": {"client": {"ring_hello": "ring taken"}, "server": {}},
    "ring taken": {"client": {}, "server": {"ring_chunk": "ring taken"}},
    "closed": {"client": {}, "server": {}},
}
"""By state and sender: the kinds that may be sent, each with the state that follows."""

KNOWN = ("open", "left", "shard open", "lead open", "lead left", "standby open")
"""The states in which the peer has completed its handshake."""
