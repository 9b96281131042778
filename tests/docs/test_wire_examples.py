"""docs/wire.md and its vectors are what the code does, and enough to write a client with."""

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

from aiops.common import urls
from aiops.errors import RemoteProtocolError, UsageError
from aiops.model.layout import Layout
from aiops.model.parts import Part
from aiops.wire import messages
from aiops.wire.connection import Connection
from aiops.wire.decoding import decode
from aiops.wire.handshake import proof as our_proof
from aiops.wire.messages import KINDS, Message
from aiops.wire.shared_payloads import SharedPayloads
from aiops.wire.state_machine import HANDSHAKE, Side
from docs._tools.wire import page, vectors
from docs._tools.wire.__main__ import main
from tests import foreign
from tests.foreign import ForeignClient
from tests.support import PATIENCE, ServerThread
from tests.wire.test_connection import OTHER, Landing, feed, no_place

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "wire.md").read_text(encoding="utf-8")
VECTORS: dict[str, Any] = json.loads((DOCS / vectors.NAME).read_text(encoding="utf-8"))
TALKS: list[dict[str, Any]] = VECTORS["conversations"]
EXAMPLES: list[dict[str, Any]] = [
    *VECTORS["messages"],
    *(said for talk in TALKS for said in talk["messages"]),
]
NAMES = [example["name"] for example in EXAMPLES]

each_example = pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
each_talk = pytest.mark.parametrize("talk", TALKS, ids=[talk["title"] for talk in TALKS])


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


def near(wire: Connection, example: dict[str, Any]) -> Connection:
    """A wire whose other side has shown what an example's payloads lie in."""
    if example.get("places") or example["header"]["kind"] == "share":
        memory = np.zeros(1 << 14, np.uint8)
        for (_segment, offset), payload in zip(
            places_of(example), payloads_of(example), strict=True
        ):
            memory[offset : offset + len(payload)] = np.frombuffer(payload, np.uint8)
        wire.shared = SharedPayloads(lambda nbytes: memory)
        wire.shared.hear(messages.Share(0, 1, len(memory)))
    return wire


def stream_of(talk: dict[str, Any], side: Side) -> bytes:
    return b"".join(
        bytes.fromhex(said["frame_hex"]) for said in talk["messages"] if said["sender"] == side
    )


class TestUpToDate:
    def test_the_page(self) -> None:
        assert page.rewritten(PAGE) == PAGE, "run `make docs`"

    def test_the_vectors(self) -> None:
        assert vectors.text() == (DOCS / vectors.NAME).read_text(encoding="utf-8"), (
            "run `make docs`"
        )

    def test_the_command_writes_both(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        marks = re.compile(r"(<!-- (\w+): generated -->\n).*?(\n<!-- end of \2 -->)", re.DOTALL)
        bare = marks.sub(r"\1stale\3", PAGE)
        assert bare.count("stale") > len(page.BLOCKS)
        (tmp_path / "wire.md").write_text(bare, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", ["wire", str(tmp_path / "wire.md")])
        main()
        assert (tmp_path / "wire.md").read_text(encoding="utf-8") == PAGE
        assert (tmp_path / vectors.NAME).read_text(encoding="utf-8") == vectors.text()

    def test_a_page_without_the_marks_is_refused(self) -> None:
        with pytest.raises(UsageError, match="<!-- fields: generated -->"):
            page.rewritten(PAGE.replace("<!-- fields: generated -->", ""))

    def test_every_field_has_a_meaning_and_every_meaning_a_field(self) -> None:
        fields = {field.name for cls in KINDS.values() for field in dataclasses.fields(cls)}
        assert set(page.MEANINGS) == fields
        assert set(page.ANSWERS) <= set(KINDS)

    def test_every_kind_is_shown(self) -> None:
        assert [example["name"] for example in VECTORS["messages"]] == list(KINDS)
        said = {said["header"]["kind"] for talk in TALKS for said in talk["messages"]}
        untold = {"stats", "report", "count", "counted"}  # a report would change with every release
        untold.add("send_coded")  # tensors as small as those here do not travel coded
        assert said == set(KINDS) - untold

    def test_links_lead_somewhere(self) -> None:
        anchors = {
            re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-")
            for title in re.findall(r"^#+ (.*)$", PAGE, re.MULTILINE)
        }
        for target in re.findall(r"\]\(([^)]+)\)", PAGE):
            assert target[1:] in anchors if target.startswith("#") else (DOCS / target).exists()

    def test_every_byte_of_the_vectors_is_on_the_page(self) -> None:
        shown = re.sub(r"[ \n]", "", PAGE)
        for example in EXAMPLES:
            assert example["header_hex"] in shown
            for number, payload in enumerate(example["payloads_hex"]):
                if places := places_of(example):
                    segment, offset = places[number]
                    assert f"dd00000002cf{segment:016x}cf{offset:016x}" in shown
                else:
                    assert f"c6{len(payload) // 2:08x}{payload}" in shown
        for row in VECTORS["proofs"][:2]:
            assert f"proof({row['side']})={row['proof']}" in shown


LONG = {
    "push": ("id", "seq", "have"),
    "ack": ("id", "version", "current", "staleness"),
    "release": ("id",),
}
"""The integers that the page says are written in eight bytes, with the version of a sole part."""


def lengthened(header: dict[str, Any]) -> dict[str, Any]:
    """Return a header of which these integers are written in eight bytes."""
    if header["kind"] not in LONG:
        return header
    for name in LONG[header["kind"]]:
        if header[name] >= 0:
            header[name] = foreign.Long(header[name])
    if len(header.get("parts", ())) == 1:
        header["parts"][0][4] = foreign.Long(header["parts"][0][4])
    return header


class TestBytes:
    @each_example
    def test_message_to_bytes(self, example: dict[str, Any]) -> None:
        message = message_of(example)
        assert messages.encode(message).hex() == example["header_hex"]
        wire = Connection(example["sender"], no_place)
        wire.state = next(
            s for s, says in HANDSHAKE.items() if message.kind in says[example["sender"]]
        )
        views = [[memoryview(payload)] for payload in payloads_of(example)]
        frame = b"".join(wire.send(message, views, places_of(example)))
        assert frame.hex() == example["frame_hex"]

    @each_example
    def test_bytes_to_message(self, example: dict[str, Any]) -> None:
        message = message_of(example)
        assert decode(bytes.fromhex(example["header_hex"])) == message
        wire = near(Connection(OTHER[example["sender"]], Landing), example)
        wire.state = next(
            s for s, says in HANDSHAKE.items() if message.kind in says[example["sender"]]
        )
        [(heard, sink)] = feed(wire, bytes.fromhex(example["frame_hex"]))
        assert heard == message
        assert list(sink.payloads if isinstance(sink, Landing) else ()) == payloads_of(example)

    @each_talk
    def test_a_conversation_is_legal_from_beginning_to_end(self, talk: dict[str, Any]) -> None:
        ends: dict[Side, Connection] = {
            side: Connection(side, Landing) for side in ("client", "server")
        }
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
    @pytest.mark.parametrize("side", ["client", "server"])
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

    @pytest.mark.parametrize("row", VECTORS["broken"], ids=lambda row: row["why"])
    def test_what_breaks_the_rules_ends_the_connection(self, row: dict[str, str]) -> None:
        with pytest.raises(RemoteProtocolError):
            feed(Connection("server", no_place), bytes.fromhex(row["frame_hex"]))

    @pytest.mark.parametrize("row", VECTORS["proofs"])
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


class TestFromThePageAlone:
    """`tests/foreign.py` is written from the page, and knows nothing else."""

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
    def test_it_writes_the_same_bytes(self, example: dict[str, Any]) -> None:
        payloads = places_of(example) or payloads_of(example)
        data = foreign.frame(lengthened(plain(example["header"])), payloads)
        assert data.hex() == example["frame_hex"]

    @each_example
    def test_it_reads_the_same_values(self, example: dict[str, Any]) -> None:
        rest = bytes.fromhex(example["frame_hex"])

        def receive(count: int) -> bytes:
            nonlocal rest
            data, rest = rest[:count], rest[count:]
            assert len(data) == count
            return data

        client = ForeignClient(lambda data: None, receive)
        payloads = places_of(example) or payloads_of(example)
        assert client.hear() == (plain(example["header"]), payloads)
        assert rest == b""

    @contextmanager
    def client(self, url: str) -> Iterator[ForeignClient]:
        with socket.create_connection(urls.parse(url), timeout=PATIENCE) as sock:
            stream = sock.makefile("rb")
            with stream:
                yield ForeignClient(sock.sendall, stream.read)

    def test_it_trains_against_a_real_server(self) -> None:
        nonce = b"0123456789abcdef"
        bias, weights = struct.pack("<e", 1), struct.pack("<4f", 1, 2, 3, 4)
        ones = struct.pack("<4f", 1, 1, 1, 1)
        with ServerThread(policy="asgd", lr=0.5, token="s3cret") as server:
            with self.client(server.url) as client:
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
            with self.client(server.url) as client:
                welcome = client.greet("foreigner", nonce, "s3cret", epoch=2)
                assert (welcome["version"], welcome["last_seq"]) == (2, 3)
                client.fetch()
                again = client.exchange({"w": ones, "b": struct.pack("<e", 2)}, seq=3)
                assert (again["kind"], again["version"]) == ("ack", 2), "it is not applied twice"
                assert client.tensor("w") == struct.pack("<4f", 0, 1, 2, 3)
                assert client.tensor("b") == struct.pack("<e", 0)
            with self.client(server.url) as client:
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
                asked = {"fetch": True, "have": -1, "wants": [], "coded": False, "count": 1}
                near.client.say("push", [(7, 64)], id=2, seq=1, parts=[part], **asked)
                ack, [values] = near.hear()
                assert (ack["kind"], ack["id"], ack["version"]) == ("ack", 2, 1)
                assert near.theirs, "the parameters are lent, too"
                assert values == struct.pack("<f", 1.5) * count
                near.client.say("push", [(7, 64)], id=3, seq=2, parts=[part], **asked)
                _ack, [later] = near.hear()
                assert later == struct.pack("<f", 1) * count
                assert near.theirs[1][:nbytes] == values, "what has not been released stays"
                near.client.say("release", id=2)
                near.client.say("release", id=3)
                near.client.say("push", [(7, 65)], id=4, seq=3, parts=[part], **asked)
                with pytest.raises(AssertionError, match="no more"):
                    near.hear()  # there is no such place
