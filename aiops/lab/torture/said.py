"""Check what servers say to hostile peers: whole messages of the wire, and documented errors."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import msgpack

from aiops.errors import Superseded, refusal
from aiops.wire.state_machine import HANDSHAKE

_ANSWERS = {kind for state in HANDSHAKE.values() for kind in state.get("server", ())}


def check_said(data: bytes | bytearray, counts: Counter[str], *, check: int = 0) -> Iterator[str]:
    """Count the whole messages that were said, and yield what is wrong with them.

    ``counts``: by kind, and for errors by code. ``check``: bytes of a checksum behind each item.
    """
    at = 0
    while at + 5 <= len(data):
        if data[at] != 0xCE:
            yield f"the server said byte {data[at]:#x} where a message begins"
            return
        begin = at + 5 + check
        end = begin + int.from_bytes(data[at + 1 : at + 5], "big")
        if end > len(data):
            return
        header = msgpack.unpackb(bytes(data[begin:end]))
        kind = header["kind"]
        if kind not in _ANSWERS:
            yield f"the server said {kind!r}"
        counts[f"error {header['code']}" if kind == "error" else kind] += 1
        if kind == "error" and not _documented(header["code"]):
            yield f"the server said an error with code {header['code']!r}"
        at = end + check
        for part in header.get("parts", ()):
            at += 5 + part[3] + check


def _documented(code: str) -> bool:
    return code in ("protocol", Superseded.code) or refusal(code, "").code == code


@contextlib.contextmanager
def errors_noted(wrong: list[str], *, exceptions_alone: bool = False) -> Iterator[None]:
    """Note what is logged as an error, by a server or asyncio; log nothing else.

    ``exceptions_alone``: of a server's errors only those that are exceptions.
    """
    before, root = logging.root.manager.disable, logging.root
    handler = _Noting(wrong, exceptions_alone)
    logging.disable(logging.WARNING)
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        logging.disable(before)


@contextlib.contextmanager
def unraisable_noted(wrong: list[str]) -> Iterator[None]:
    """Note exceptions that no caller could hear: of compiled code, finalizers and threads."""
    before = sys.unraisablehook, threading.excepthook

    def note(unraisable: sys.UnraisableHookArgs | threading.ExceptHookArgs) -> None:
        wrong.append(f"unheard: {unraisable.exc_type.__name__}: {unraisable.exc_value}")

    sys.unraisablehook = threading.excepthook = note
    try:
        yield
    finally:
        sys.unraisablehook, threading.excepthook = before


class _Noting(logging.Handler):
    def __init__(self, wrong: list[str], exceptions_alone: bool) -> None:
        super().__init__(logging.ERROR)
        self._wrong, self._exceptions_alone = wrong, exceptions_alone

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        if not self._exceptions_alone or record.name == "asyncio" or record.exc_info:
            self._wrong.append(f"logged: {self.format(record)}")
