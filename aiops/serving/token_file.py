"""The file of ``--tokens``: read it, and notice when it changes."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TypeAlias

from aiops.access.tokens import TokenTable
from aiops.errors import UsageError

_log = logging.getLogger("aiops.server")

_LARGEST = 16 << 20  # bytes

_Stamp: TypeAlias = tuple[int, int, int]  # inode, size, time of the last change in ns


class TokenFile:
    """The tokens that a server takes: those of a file, if it has one, and its own.

    Parameters
    ----------
    path
        The file; None: there is none.
    own
        The server's own token (``--token``), or None.
    """

    def __init__(self, path: Path | None, own: str | None) -> None:
        self._path, self._own = path, own
        self._stamp: _Stamp | None = None
        self._fault = ""  # that was logged last

    def read(self) -> TokenTable | None:
        """Return the tokens; None: the server asks for none.

        Raises
        ------
        UsageError
            When the file cannot be read, is open to other users, or is no token file.
        """
        if self._path is None:
            return None if self._own is None else TokenTable().with_own(self._own)
        table, self._stamp = read_tokens(self._path), self._present()
        return table.with_own(self._own)

    def changed(self) -> TokenTable | None:
        """Return the tokens if the file has changed since it was read, and can be read; else None.

        A file that cannot be read changes nothing: that is logged, once for each reason.
        """
        if self._path is None or self._present() == self._stamp:
            return None
        return self.read_again()

    def read_again(self) -> TokenTable | None:
        """Return the tokens of the file, if there is one that can be read; else None, as above."""
        if self._path is None:
            return None
        try:
            found = self.read()
        except UsageError as error:
            if str(error) != self._fault:
                _log.error("%s; the tokens of before go on", error)
            self._fault = str(error)
            return None
        self._fault = ""
        return found

    def _present(self) -> _Stamp | None:
        assert self._path is not None, "it is asked for with a path only"
        try:
            found = os.stat(self._path)
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def filter_of(given: str, path: Path | None) -> str:
    """Return the filters of a server: for ``auto``, those against untrusted tokens, if it has any.

    Parameters
    ----------
    given
        ``--filter``.
    path
        ``--tokens``.

    Raises
    ------
    UsageError
        As of `read_tokens`.
    """
    if given != "auto":
        return given
    untrusted = path is not None and any(token.untrusted for token in read_tokens(path))
    return "robust" if untrusted else "off"


def read_tokens(path: Path) -> TokenTable:
    """Return the tokens of a file that other users can neither read nor write.

    Raises
    ------
    UsageError
        When they can, or when the file cannot be read, or is no token file.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if os.name == "posix" and mode & 0o027:
                raise UsageError(
                    f"{path} is open to other users (mode {mode & 0o777:03o}): chmod 600 {path}",
                    exposed=str(path),
                )
            data = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(
            f"--tokens {path}: {error.strerror}; `aiops token new --file {path}` makes one"
        ) from None
    if len(data) > _LARGEST:
        raise UsageError(f"{path} has more than {_LARGEST >> 20} MiB: it is no token file")
    try:
        return TokenTable.parse(data.decode(), str(path))
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not TOML: it is not UTF-8") from None
