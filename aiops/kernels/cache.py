"""Keep generated modules on disk, so that their machine code outlives the process.

Numba stores the machine code of a function beside the file that defines it. Generated text has no
file, so it gets one in the user's cache folder. Where no folder can be written to, the text runs
from memory, and every process compiles it again.
"""

from __future__ import annotations

import linecache
import os
import stat
import sys
import tempfile
from pathlib import Path
from types import ModuleType

__all__ = ["folder", "load"]


def folder() -> Path | None:
    """Return the cache folder, which is made if need be, or None when none can be trusted.

    It is ``aiops/kernels`` under ``$XDG_CACHE_HOME``, by default ``~/.cache``. Numba unpickles the
    files in it, so it must belong to this user, and no other user may write to it.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
        place = root / "aiops" / "kernels"
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = place.stat()
    except (OSError, RuntimeError):  # RuntimeError: no home directory
        return None
    private = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return place if private and os.access(place, os.W_OK | os.X_OK) else None


def load(name: str, text: str) -> tuple[ModuleType, bool]:
    """Execute ``text`` as module ``name``; return the module, and whether it has a file.

    Several processes may do this at the same time. The text that is executed is always the
    argument, never the content of an existing file.
    """
    place = folder()
    path = _written(place / f"{name}.py", text) if place is not None else None
    filename = str(path) if path is not None else f"<aiops kernel {name}>"
    if path is None:
        # Tracebacks and debuggers show the text although it is in no file.
        linecache.cache[filename] = (len(text), None, text.splitlines(keepends=True), filename)
    module = ModuleType(f"aiops_kernel_{name}")
    module.__file__ = filename
    # Numba finds the globals of cached machine code through this table.
    sys.modules[module.__name__] = module
    exec(compile(text, filename, "exec"), module.__dict__)
    return module, path is not None


def _written(path: Path, text: str) -> Path | None:
    """Make sure that the file holds the text; return its path, or None if it cannot."""
    try:
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            return path  # left as it is: Numba's cache depends on its modification time
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            # The first of several processes wins, and its file keeps its modification time.
            if path.exists():
                os.replace(temporary, path)
            else:
                _link_or_replace(temporary, path)
        finally:
            Path(temporary).unlink(missing_ok=True)
    except (OSError, UnicodeDecodeError):
        return None
    return path


def _link_or_replace(temporary: str, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        pass
    except OSError:  # a file system without hard links
        os.replace(temporary, path)
