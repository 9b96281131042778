"""The exit status of each kind of error, and the table of them."""

from __future__ import annotations

import errno
import re
import socket
from pathlib import Path

from aiops import errors
from aiops.cli.exit_status import MEANINGS, status_of
from aiops.errors import UsageError
from tests.rows import each_row

PAGE = (Path(__file__).parents[2] / "docs" / "guide-running.md").read_text(encoding="utf-8")


def caused(cause: Exception, **details: str) -> UsageError:
    """The error of a command that has met another one, as commands raise it."""
    try:
        try:
            raise cause
        except type(cause):
            raise UsageError("it cannot work", **details) from None
    except UsageError as error:
        return error


def lost(cause: OSError) -> errors.ConnectionLost:
    """The error of a client that could not connect."""
    try:
        raise errors.ConnectionLost("it cannot be reached") from cause
    except errors.ConnectionLost as error:
        return error


@each_row(
    ("error", "status"),
    [
        (UsageError(""), 64),
        (errors.ConflictError(""), 64),
        (errors.AiopsError(""), 70),
        (errors.DamagedState(""), 65),
        (errors.BadPush(""), 65),
        (UsageError("", damaged="model.safetensors"), 65),
        (UsageError("", exposed="tokens.json"), 77),
        (UsageError("", output="run"), 73),
        (caused(FileNotFoundError(errno.ENOENT, "")), 66),
        (caused(IsADirectoryError(errno.EISDIR, "")), 66),
        (UsageError("", missing="train.py"), 66),
        (caused(socket.gaierror(socket.EAI_NONAME, "")), 68),
        (caused(OSError(-2, "")), 68),
        (errors.ConnectionLost(""), 69),
        (lost(OSError(socket.EAI_NONAME, "")), 68),
        (lost(OSError(socket.EAI_AGAIN, "")), 69),
        (lost(ConnectionRefusedError(errno.ECONNREFUSED, "")), 69),
        (errors.DeadlineExceeded(""), 69),
        (caused(errors.ConnectionLost("")), 69),
        (caused(OSError(errno.EADDRINUSE, "")), 69),
        (caused(ImportError("")), 69),
        (caused(FileNotFoundError(errno.ENOENT, ""), output="m"), 73),
        (caused(FileExistsError(errno.EEXIST, "")), 73),
        (caused(OSError(errno.ENOSPC, ""), output="m"), 74),
        (caused(OSError(errno.EIO, "")), 74),
        (errors.NotReady(""), 75),
        (errors.Unavailable(""), 75),
        (errors.RolledBack(""), 75),
        (errors.RemoteProtocolError(""), 76),
        (errors.Unauthorised(""), 77),
        (errors.Untrusted(""), 77),
        (caused(PermissionError(errno.EACCES, ""), output="m"), 77),
        (PermissionError(errno.EACCES, "", "m"), 77),
        (UsageError("", config="server.toml"), 78),
        (errors.Superseded(""), 3),
    ],
)
def test_of_an_error(error: Exception, status: int) -> None:
    assert status_of(error) == status
    assert status in MEANINGS


def test_every_error_has_one() -> None:
    for name in errors.__all__:
        kind = getattr(errors, name)
        assert status_of(kind("")) in MEANINGS


def test_the_table_of_the_page() -> None:
    section = PAGE.partition("### Exit statuses")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| (\d+) \| \w* \| (.+) \|$", section, re.MULTILINE)
    assert {int(status): meaning for status, meaning in rows} == MEANINGS
    prevented = re.search(r"^RestartPreventExitStatus=([\d ]+)$", PAGE, re.MULTILINE)
    assert prevented is not None
    again = {0, 1, 69, 74, 75, 130}
    assert {int(status) for status in prevented[1].split()} == MEANINGS.keys() - again
