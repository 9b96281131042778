"""Keys of a terminal, one by one."""

from __future__ import annotations

import os
import sys

import pytest

from aiops.net.keys import Keys, keys

pty = pytest.importorskip("pty")


def test_a_key_is_there_without_the_end_of_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    with open(theirs, closefd=False) as file:
        monkeypatch.setattr(sys, "stdin", file)
        with keys() as pressed:
            assert pressed.wait(0.0) == ""
            os.write(ours, b"s")
            assert pressed.wait(5.0) == "s"
        import termios

        assert termios.tcgetattr(theirs)[3] & termios.ICANON, "it is as before"
    os.close(ours)
    os.close(theirs)


def test_without_a_terminal_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    with open(os.devnull) as file:
        monkeypatch.setattr(sys, "stdin", file)
        with keys() as pressed:
            assert pressed.wait(0.0) == ""


def test_a_terminal_that_is_closed_is_not_asked_again() -> None:
    readable, written = os.pipe()
    os.close(written)
    pressed = Keys(readable)
    assert pressed.wait(5.0) == ""
    os.close(readable)
    assert pressed.wait(0.0) == ""
