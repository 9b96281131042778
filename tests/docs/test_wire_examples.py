"""The wire's pages and vectors state what the code does, and suffice to write a client."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from aiops.bandwidth import gates
from aiops.common import urls
from aiops.errors import RemoteProtocolError, UsageError
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire import encoding, messages
from aiops.wire.decoding import decode
from aiops.wire.encoding import KINDS
from aiops.wire.handshake import proof as our_proof
from aiops.wire.messages import Message
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.state_machine import HANDSHAKE, Side
from docs._tools.wire import page, vectors
from docs._tools.wire.__main__ import main
from docs._tools.wire.meanings import ANSWERS, MEANINGS
from tests import foreign
from tests.driven import Driven, no_sink
from tests.foreign import ForeignClient
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread
from tests.wire.test_connection import OTHER, Landing, feed

DOCS = Path(__file__).parents[2] / "docs"
PAGES = {name: (DOCS / name).read_text(encoding="utf-8") for name in page.PAGES}
PAGE = PAGES["wire.md"]
VECTORS: dict[str, Any] = json.loads((DOCS / vectors.NAME).read_text(encoding="utf-8"))
TALKS: list[dict[str, Any]] = VECTORS["conversations"]
EXAMPLES: list[dict[str, Any]] = [
    *VECTORS["messages"],
    *(said for talk in TALKS for said in talk["messages"]),
]
NAMES = [example["name"] for example in EXAMPLES]

each_example = each_row("example", EXAMPLES, ids=NAMES)
each_talk = each_row("talk", TALKS, ids=[talk["title"] for talk in TALKS])


def plain(value: Any) -> Any:
    """A value of the vectors as it is on the wire."""
    if isinstance(value, dict):
        if set(value) == {"bytes"}:
            return bytes.fromhex(value["bytes"])
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


def tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(tuples(item) for item in value)
    return {k: tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


def message_of(example: dict[str, Any]) -> Message:
    """The message of an example, made from its fields."""
    fields = tuples(plain(example["header"]))
    kind = fields.pop("kind")
    if "parts" in fields:
        fields["parts"] = tuple(Part(*row) for row in fields["parts"])
    return KINDS[kind](**fields)


def payloads_of(example: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(text) for text in example["payloads_hex"]]


def places_of(example: dict[str, Any]) -> list[tuple[int, int]]:
    return [(segment, offset) for segment, offset in example.get("places", ())]


def near(wire: Driven, example: dict[str, Any]) -> Driven:
    """A wire whose other side has shown what an example's payloads lie in."""
    if example.get("places") or example["header"]["kind"] == "share":
        memory = np.zeros(1 << 14, np.uint8)
        for (_segment, offset), payload in zip(
            places_of(example), payloads_of(example), strict=True
        ):
            memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        wire.shared = SharedPayloads(lambda nbytes: memory)
        wire.shared.map(messages.Share(0, 1, len(memory)))
    return wire


def stream_of(talk: dict[str, Any], side: Side) -> bytes:
    return b"".join(
        bytes.fromhex(said["frame_hex"]) for said in talk["messages"] if said["sender"] == side
    )


each_page = each_row("name", PAGES)

SHOWN = re.compile(
    r"^(client|server): (\{.*\})\n((?:[0-9a-f]{10}(?: [0-9a-f]+)?\n(?: {11}[0-9a-f]+\n)*)+)",
    re.MULTILINE,
)
"""An example on a page: its sender, its fields, and its bytes in lines."""


def shown_on(text: str) -> list[tuple[Side, dict[str, Any], str]]:
    """The examples of a page, each with its sender, its header and its bytes in hex."""
    found: list[tuple[Side, dict[str, Any], str]] = []
    for sender, header, hexes in SHOWN.findall(text):
        as_json = re.sub(r"h'([0-9a-f]*)'", r'{"bytes": "\1"}', header)
        found.append((sender, plain(json.loads(as_json)), re.sub(r"[ \n]", "", hexes)))
    return found


class TestUpToDate:
    @each_page
    def test_the_pages(self, name: str) -> None:
        assert page.rewritten(PAGES[name], page.PAGES[name]) == PAGES[name], "run `make docs`"

    def test_the_vectors(self) -> None:
        assert vectors.text() == (DOCS / vectors.NAME).read_text(encoding="utf-8"), (
            "run `make docs`"
        )

    def test_the_command_writes_all(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        marks = re.compile(r"(<!-- (\w+): generated -->\n).*?(\n<!-- end of \2 -->)", re.DOTALL)
        for name, text in PAGES.items():
            bare = marks.sub(r"\1outdated\3", text)
            assert bare.count("outdated") == len(page.PAGES[name])
            (tmp_path / name).write_text(bare, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["wire", str(tmp_path / "wire.md")])
        main()
        for name, text in PAGES.items():
            assert (tmp_path / name).read_text(encoding="utf-8") == text
        assert (tmp_path / vectors.NAME).read_text(encoding="utf-8") == vectors.text()

    def test_a_page_without_the_marks_is_refused(self) -> None:
        with pytest.raises(UsageError, match="<!-- limits: generated -->"):
            page.rewritten(PAGE.replace("<!-- limits: generated -->", ""), page.PAGES["wire.md"])

    def test_every_field_has_a_meaning_and_every_meaning_a_field(self) -> None:
        names = {field.name for cls in KINDS.values() for field in dataclasses.fields(cls)}
        own = {f"{kind}.{f.name}" for kind, cls in KINDS.items() for f in dataclasses.fields(cls)}
        assert names <= set(MEANINGS) <= names | own
        assert set(ANSWERS) <= set(KINDS)

    def test_every_kind_is_in_the_vectors(self) -> None:
        assert [example["name"] for example in VECTORS["messages"]] == list(KINDS)
        sent = {step["header"]["kind"] for talk in TALKS for step in talk["messages"]}
        unsent = {"stats", "report"}  # a report would change with every release
        unsent |= {"count_traffic", "traffic_counted"}  # which are sent for a report
        unsent |= {
            "share_secret",
            "snapshot_saved",
            "keep_sets",
            "note_history",
            "roll_back",
        }  # of shards with a state
        unsent.add("send_away")  # for an administrator
        unsent.add("log")  # of loops that log
        unsent |= {"send_rows", "stored_rows"}  # of a model that is saved
        unsent.add("close_pushes")  # of one that ends with rows on all servers
        unsent |= {"pace_clients", "budget_used"}  # of shards with a bandwidth budget
        unsent |= {"settle_round", "settled"}  # of workers that average on a data set
        unsent |= {*page.ADMIN_KINDS}  # each is one request, or its answer
        unsent.add("send_increments")  # tensors as small as those here do not travel coded
        assert sent == set(KINDS) - unsent

    @each_page
    def test_links_lead_somewhere(self, name: str) -> None:
        anchors = {
            other: {
                re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
                for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
            }
            for other, text in PAGES.items()
        }
        for target in re.findall(r"\]\(([^)]+)\)", PAGES[name]):
            file, _hash, anchor = target.partition("#")
            assert (DOCS / file).exists()
            assert not anchor or anchor in anchors[file or name], target


class TestThePage:
    """docs/wire.md is what a client needs, and no more."""

    def test_its_length(self) -> None:
        assert len(PAGE.splitlines()) <= 457

    def test_every_kind_that_a_client_may_send_or_receive_is_on_it(self) -> None:
        servers = {*page.SERVER_KINDS, *page.STANDBY_KINDS, *page.PROMOTION_KINDS}
        servers |= {*page.ADMIN_KINDS}
        for kind in set(KINDS) - servers:
            assert f"`{kind}`" in PAGE, kind

    def test_no_kind_of_the_servers_is_on_it(self) -> None:
        for kind in page.SERVER_KINDS:
            assert kind not in PAGE
            assert f"`{kind}`" in PAGES["wire-servers.md"]
        for kind in (*page.STANDBY_KINDS, *page.PROMOTION_KINDS):
            assert f"`{kind}`" not in PAGE
            assert f"`{kind}`" in PAGES["wire-standby.md"]

    def test_the_servers_kinds_are_those_that_no_client_may_send_or_receive(self) -> None:
        leads = {kind for state in ("lead open", "lead left") for kind in _sayable(state)}
        others = {
            kind
            for state in HANDSHAKE
            if not state.startswith("lead")
            for kind in _sayable(state)
            if kind != "lead_hello"  # the first on a connection of the lead's
        }
        assert set(page.SERVER_KINDS) == leads - others | {"lead_hello"}

    def test_every_field_of_its_kinds_is_explained(self) -> None:
        rows = re.findall(r"^\| `.*$", PAGE + PAGES["wire-tables.md"], re.M)
        explained = set(re.findall(r"`(\w+)`", "".join(rows)))
        kinds = [*page.HANDSHAKE_KINDS, *page.MODEL_KINDS, *page.PUSH_KINDS, *page.TABLE_KINDS]
        for kind in [*kinds, *page.OTHER_KINDS]:
            assert {f.name for f in dataclasses.fields(KINDS[kind])} - {"id"} <= explained, kind

    def test_every_code_is_explained(self) -> None:
        for code in ("bad-push", "not-ready", "refused", "stale", "unauthorised", "unavailable"):
            assert f"| `{code}` |" in PAGE

    def test_every_key_of_a_plan_is_explained(self) -> None:
        plan = {"routine", "recompute", "patience", "seconds_per_byte", "heartbeat"}
        plan |= {"worker", "push_codec", "fetch_codec", "gate", "average"}
        settings = {f.name for kind in gates.KINDS.values() for f in dataclasses.fields(kind)}
        settings -= {"floor_free", "seed"}  # told in `floor`; and what a client draws is its own
        for name in plan | settings:
            assert f"`{name}`" in PAGE, name

    @each_page
    def test_every_example_is_right_to_the_byte(self, name: str) -> None:
        examples = shown_on(PAGES[name])
        assert len(examples) == len(re.findall(r"^(?:client|server): ", PAGES[name], re.M))
        assert len(examples) >= {"wire.md": 15}.get(name, 2)
        known = {
            (each["sender"], json.dumps(each["header"]), each["frame_hex"]) for each in EXAMPLES
        }
        for sender, header, frame in examples:
            kind = header["kind"]
            wire = Driven(OTHER[sender], Landing)
            memory = np.zeros(1 << 14, np.uint8)
            wire.shared = SharedPayloads(lambda nbytes, memory=memory: memory)
            wire.shared.map(messages.Share(0, 1, len(memory)))
            wire.state = next(s for s, says in HANDSHAKE.items() if kind in says[sender])
            [(heard, _sink)] = feed(wire, bytes.fromhex(frame))
            assert vectors.fields(heard) == vectors.plain(header)
            assert (sender, json.dumps(vectors.plain(header)), frame) in known

    def test_the_proof_on_it(self) -> None:
        text = re.sub(r"[ \n]", "", PAGE)
        for row in VECTORS["proofs"][:2]:
            assert f"proof({row['side']})={row['proof']}" in text


def _sayable(state: str) -> set[str]:
    return {kind for side in HANDSHAKE[state].values() for kind in side}


LONG = {
    "push": ("id", "seq", "have"),
    "ack": ("id", "version", "current", "staleness"),
    "release": ("id",),
    "fetch_rows": ("id", "table"),
    "push_rows": ("id", "seq", "table", "version"),
    "rows": ("id", "version", "staleness"),
}
"""The integers that are written in eight bytes, with the version of each part."""

ROWS = ("fetch_rows", "push_rows", "rows")
"""Messages of which the rows, bytes and version of every part are written so, too."""


def lengthened(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header of which these integers are written in eight bytes."""
    if header["kind"] not in LONG:
        return header
    for name in LONG[header["kind"]]:
        if header[name] >= 0:
            header[name] = foreign.Wide(header[name])
    if header["kind"] in ROWS:
        for part in header["parts"]:
            for field in (1, 3, 4):
                part[field] = foreign.Wide(part[field])
    else:
        for part in header.get("parts", ()):
            part[4] = foreign.Wide(part[4])
    return header


class TestBytes:
    @each_example
    def test_message_to_bytes_and_back(self, example: dict[str, Any]) -> None:
        message = message_of(example)
        assert encoding.encode(message).hex() == example["header_hex"]
        wire = Driven(example["sender"], no_sink)
        wire.state = next(
            s for s, says in HANDSHAKE.items() if message.kind in says[example["sender"]]
        )
        views = [[memoryview(payload)] for payload in payloads_of(example)]
        frame = b"".join(wire.send(message, views, places_of(example)))
        assert frame.hex() == example["frame_hex"]
        assert decode(bytes.fromhex(example["header_hex"])) == message
        wire = near(Driven(OTHER[example["sender"]], Landing), example)
        wire.state = next(
            s for s, says in HANDSHAKE.items() if message.kind in says[example["sender"]]
        )
        [(heard, sink)] = feed(wire, bytes.fromhex(example["frame_hex"]))
        assert heard == message
        assert list(sink.payloads if isinstance(sink, Landing) else ()) == payloads_of(example)

    @each_talk
    def test_a_conversation_is_legal_from_beginning_to_end(self, talk: dict[str, Any]) -> None:
        ends: dict[Side, Driven] = {side: Driven(side, Landing) for side in ("client", "server")}
        for said in talk["messages"]:
            views = [[memoryview(payload)] for payload in payloads_of(said)]
            sender = ends[said["sender"]]
            near(ends[OTHER[said["sender"]]], said)
            stream = b"".join(sender.send(message_of(said), views, places_of(said)))
            assert stream.hex() == said["frame_hex"]
            [(heard, _sink)] = feed(ends[OTHER[said["sender"]]], stream)
            assert heard == message_of(said)
            assert ends["client"].state == ends["server"].state

    @each_talk
    @each_row("side", ["client", "server"])
    def test_each_direction_is_one_messagepack_stream(
        self, talk: dict[str, Any], side: Side
    ) -> None:
        unpacker = msgpack.Unpacker()
        unpacker.feed(stream_of(talk, side))
        objects = list(unpacker)
        wanted: list[Any] = []
        for said in talk["messages"]:
            if said["sender"] == side:
                lent = [list(place) for place in places_of(said)]
                payloads = lent or payloads_of(said)
                wanted += [len(said["header_hex"]) // 2, plain(said["header"]), *payloads]
        assert objects == wanted

    @each_row("row", VECTORS["broken"], ids=lambda row: row["why"])
    def test_what_breaks_the_rules_ends_the_connection(self, row: dict[str, str]) -> None:
        with pytest.raises(RemoteProtocolError):
            feed(Driven("server", no_sink), bytes.fromhex(row["frame_hex"]))

    @each_row("row", VECTORS["proofs"])
    def test_proofs(self, row: dict[str, Any]) -> None:
        nonces = bytes.fromhex(row["client_nonce"]), bytes.fromhex(row["server_nonce"])
        for make in (our_proof, foreign.proof):
            assert make(row["token"], row["side"], *nonces, row["client"]).hex() == row["proof"]

    @pytest.mark.parametrize("row", VECTORS["layouts"])
    def test_layouts(self, row: dict[str, Any]) -> None:
        offered, arena = tuples(row["offered"]), tuples(row["arena"])
        assert Layout(offered).rows == arena
        by_rule = sorted(offered, key=lambda t: (-foreign.ITEM[t[1]], t[1]))
        assert [row[:3] for row in arena] == by_rule


@contextmanager
def connected(url: str) -> Iterator[ForeignClient]:
    """A client on a connection of its own, before the handshake."""
    with socket.create_connection(urls.parse(url), timeout=PATIENCE) as sock:
        stream = sock.makefile("rb")
        with stream:
            yield ForeignClient(sock.sendall, stream.read)


class TestFromThePageAlone:
    """`tests/foreign.py` is written from the pages, and knows nothing else."""

    def test_it_imports_nothing_of_ours(self) -> None:
        tree = ast.parse(Path(foreign.__file__).read_text(encoding="utf-8"))
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
        assert imported <= set(sys.stdlib_module_names)

    @each_example
    def test_it_writes_the_same_bytes_and_reads_the_same_values(
        self, example: dict[str, Any]
    ) -> None:
        payloads = places_of(example) or payloads_of(example)
        data = foreign.frame(lengthened(plain(example["header"])), payloads)
        assert data.hex() == example["frame_hex"]
        rest = bytes.fromhex(example["frame_hex"])

        def receive(count: int) -> bytes:
            nonlocal rest
            data, rest = rest[:count], rest[count:]
            assert len(data) == count
            return data

        client = ForeignClient(lambda data: None, receive)
        assert client.receive() == (plain(example["header"]), payloads)
        assert rest == b""

    def test_it_trains_against_a_real_server(self) -> None:
        nonce = b"0123456789abcdef"
        bias, weights = struct.pack("<e", 1), struct.pack("<4f", 1, 2, 3, 4)
        ones = struct.pack("<4f", 1, 1, 1, 1)
        with ServerThread(policy="asgd", lr=0.5, token="s3cret") as server:
            with connected(server.url) as client:
                welcome = client.greet("foreigner", nonce, "s3cret")
                assert (welcome["kind"], welcome["model"]) == ("welcome", [])
                assert client.fetch()["code"] == "not-ready"
                model = client.define(
                    {"b": ("float16", [1], bias), "w": ("float32", [2, 2], weights)}
                )
                assert model["created"] is True
                assert model["model"] == [["w", "float32", [2, 2], 0], ["b", "float16", [1], 16]]
                assert client.fetch()["version"] == 0
                assert (client.tensor("w"), client.tensor("b")) == (weights, bias)

                ack = client.exchange({"w": ones})
                assert (ack["kind"], ack["version"], ack["staleness"]) == ("ack", 1, 0)
                assert client.tensor("w") == struct.pack("<4f", 0.5, 1.5, 2.5, 3.5)
                assert (client.tensor("b"), client.versions) == (bias, {"w": 1, "b": 0})
                assert client.fetch()["parts"] == []

                refused = client.exchange({"w": struct.pack("<4f", 1, 1, 1, float("inf"))})
                assert (refused["kind"], refused["code"]) == ("error", "bad-push")
                assert refused["details"]["tensor"] == "w"
                assert client.ask("ping")["kind"] == "pong"
                last = client.exchange({"w": ones, "b": struct.pack("<e", 2)})
                assert last["version"] == 2
            with connected(server.url) as client:
                welcome = client.greet("foreigner", nonce, "s3cret", epoch=2)
                assert (welcome["version"], welcome["last_seq"]) == (2, 3)
                client.fetch()
                again = client.exchange({"w": ones, "b": struct.pack("<e", 2)}, seq=3)
                assert (again["kind"], again["version"]) == ("ack", 2), "it is not applied twice"
                assert client.tensor("w") == struct.pack("<4f", 0, 1, 2, 3)
                assert client.tensor("b") == struct.pack("<e", 0)
            with connected(server.url) as client:
                error = client.greet("another", nonce, "guess")
                assert (error["kind"], error["code"]) == ("error", "unauthorised")
                assert error["fatal"] is True

    def test_it_shares_memory_with_a_real_server(self) -> None:
        count = 1 << 15  # 128 KiB: less is sent as a copy
        weights, nbytes = struct.pack("<f", 2) * count, 4 * count
        with ServerThread(policy="asgd", lr=0.5) as server:
            near = foreign.ForeignNeighbour(*urls.parse(server.url))
            with near.sock, near.side, near.stream:
                assert near.client.greet("neighbour", b"0123456789abcdef")["kind"] == "welcome"
                near.client.define({"w": ("float32", [count], weights)})
                near.share(7, 64 + nbytes)[64:] = struct.pack("<f", 1) * count
                part = [0, nbytes, "raw", nbytes, 0]
                asked = {
                    "fetch": True,
                    "have": -1,
                    "wants": [],
                    "coded": False,
                    "count": 1,
                    "lr_factors": [],
                }
                near.client.say("push", [(7, 64)], id=2, seq=1, parts=[part], **asked)
                ack, [values] = near.receive()
                assert (ack["kind"], ack["id"], ack["version"]) == ("ack", 2, 1)
                assert near.theirs, "the parameters are lent, too"
                assert values == struct.pack("<f", 1.5) * count
                near.client.say("push", [(7, 64)], id=3, seq=2, parts=[part], **asked)
                _ack, [later] = near.receive()
                assert later == struct.pack("<f", 1) * count
                assert near.theirs[1][:nbytes] == values, "what has not been released stays"
                near.client.say("release", id=2)
                near.client.say("release", id=3)
                near.client.say("push", [(7, 65)], id=4, seq=3, parts=[part], **asked)
                with pytest.raises(AssertionError, match="no more"):
                    near.receive()  # there is no such place
