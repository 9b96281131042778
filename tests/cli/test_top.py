"""``aiops top``: one look, as text and as JSON, and the live one with its keys."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import aiops
from aiops.cli import top as command
from aiops.cli.stats import stats
from aiops.dashboard.overview import Overview
from aiops.errors import ConnectionLost, UsageError, nearest
from aiops.net.keys import Keys
from tests.support import ServerThread

MODEL = {"w": np.ones((4, 4), np.float32)}


@contextlib.contextmanager
def training() -> Iterator[ServerThread]:
    """A server with two workers, of which one has a name that would clear the screen."""
    with (
        ServerThread(policy="asgd", kernels="numpy") as server,
        aiops.Worker(server.url, MODEL, name="w1") as first,
        aiops.Worker(server.url, MODEL, name="[red]\x1b[2Jw2") as second,
        aiops.Client(server.url, name="evaluator") as client,
    ):
        first.step(MODEL)
        second.step(MODEL)
        second.step(MODEL)
        client.log(accuracy=0.75)
        client.stats()
        yield server


def test_one_look(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_ONCE", 0.01)
    with training() as server:
        command.top(server.url, once=True)
        text = capsys.readouterr().out
        assert "version 3 " in text
        assert "accuracy 0.75" in text
        assert re.search(r"^w1 +worker ", text, re.MULTILINE)
        assert "[red]�[2Jw2" in text, "neither markup nor a control character"
        assert "\x1b" not in text
        command.top(server.url, once=True, as_json=True, sort="pushes")
        found = json.loads(capsys.readouterr().out)
        assert found["version"] == 3
        assert [row["pushes"] for row in found["rows"]][:2] == [2, 1]
        with pytest.raises(UsageError, match="no column 'pushs'; did you mean 'pushes'"):
            command.top(server.url, once=True, sort="pushs")
    for every in (0.0, math.inf, math.nan):
        with pytest.raises(UsageError, match=r"--every is from 0\.2 to 86,400 seconds"):
            command.top(server.url, every=every)


@pytest.mark.parametrize("once", [False, True])
def test_a_server_that_is_never_reached_is_an_error(once: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionLost):
        command.top(f"aiops://127.0.0.1:{port}", once=once, timeout=0.05)


def test_a_hint_where_nothing_is_known() -> None:
    assert nearest("w1", []) == "there are none"


def test_a_name_may_be_sorted_by_before_it_is_logged() -> None:
    nothing = Overview({}, [], [])
    command._Order("loss", False).check(nothing)
    with pytest.raises(UsageError, match="did you mean 'pushes'"):
        command._Order("pushs", False).check(nothing)


def test_statistics_show_such_a_name_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with training() as server:
        stats(server.url)
    text = capsys.readouterr().out
    assert "[red]�[2Jw2" in text
    assert "\x1b" not in text


class Pressed(Keys):
    """Keys that a script presses; an empty one lets a look pass."""

    def __init__(self, given: list[str]) -> None:
        super().__init__(None)
        self.given = given

    def wait(self, seconds: float) -> str:
        return self.given.pop(0)


class Told:
    """A client that is told the same, of many workers."""

    url = "aiops://host"

    def __init__(self, server: ServerThread) -> None:
        report = server.call(lambda running: dict(running.engine.report()))
        lines = [line for line in report["workers"] if line["role"] == "worker"]
        many = [{**lines[n % 2], "worker": n, "name": f"w{n}", "pushes": n} for n in range(1000)]
        self.report: dict[str, Any] = {**report, "workers": many, "warnings": []}
        self.asked = 0

    def stats(self) -> dict[str, Any]:
        self.asked += 1
        return {**self.report, "seconds": self.report["seconds"] + self.asked}


def test_the_live_look_fits_the_screen_and_follows_keys() -> None:
    with training() as server:
        client = Told(server)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=64, height=20, color_system=None)
    look = command._Look(client, command._Order("staleness", False))
    pressed = Pressed(["", "s", "r", "x", "q", "never"])
    command._show(console, look, 2.0, pressed)
    assert pressed.given == ["never"]
    assert client.asked == 2, "keys ask the server nothing"
    assert look.order.name == "pushes"
    assert look.order.reverse
    drawn = [frame for frame in file.getvalue().split("\x1b[H") if "client" in frame]
    assert len(drawn) >= 4
    for frame in drawn:
        lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", frame).splitlines()
        assert len(lines) <= 20
        assert max(map(len, lines)) <= 64
        assert any("... and 988 more" in line for line in lines)


def test_a_look_without_a_bound_has_all_rows() -> None:
    with training() as server:
        found = Overview.of(Told(server).stats())
    console = Console(file=io.StringIO(), width=200)
    console.print(command.screen("aiops://a", found, found.rows, "name", 200))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "w999" in text
    assert "more" not in text
