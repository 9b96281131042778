"""Python calls, counted and not timed: the same number on every machine, however busy it is."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakSet

import aiops
from aiops.kernels import backend

_ROOT = Path(aiops.__file__).parent
_TESTS = Path(__file__).parent


@dataclass
class Calls:
    """The Python functions entered while something ran, comprehensions and generators included.

    Attributes
    ----------
    names
        How often each function was entered, as ``file:function``.
    path
        The same functions, one after the other.
    """

    names: Counter[str] = field(default_factory=Counter)
    path: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """How many calls."""
        return self.names.total()

    @property
    def files(self) -> set[str]:
        """The files entered."""
        return {name.partition(":")[0] for name in self.names}

    @property
    def returns(self) -> int:
        """How often a file was entered that had been left for another one before."""
        seen: set[str] = set()
        last, found = "", 0
        for name in self.path:
            file = name.partition(":")[0]
            if file != last:
                found += file in seen
                seen.add(file)
            last = file
        return found

    def __str__(self) -> str:
        return f"{self.count} calls:\n" + "\n".join(self.path)


class _Aside(WeakSet[backend.PendingNumba]):
    """Promises made while those of before are put aside: what ends meanwhile ends there too."""

    def __init__(self, before: WeakSet[backend.PendingNumba]) -> None:
        super().__init__()
        self._before = before

    def discard(self, item: backend.PendingNumba) -> None:
        super().discard(item)
        self._before.discard(item)


@contextmanager
def none_pending() -> Iterator[None]:
    """Begin without a promise of Numba: another test's server may still compile, on a thread."""
    before = backend._PENDING
    aside = backend._PENDING = _Aside(before)
    try:
        yield
    finally:
        before |= aside
        backend._PENDING = before


def calls(function: Callable[[], object]) -> Calls:
    """Run a function; return the Python calls that it made, those of the tests left out."""
    found = Calls()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if event != "call" or file.is_relative_to(_TESTS):
            return
        if file.is_relative_to(_ROOT):
            file = file.relative_to(_ROOT)
        elif "numba" in file.parts or file.parent.name == "kernels":
            return  # compiled, and told all the same
        if code.co_name.endswith("_loop"):
            return  # so are these
        name = f"{file}:{code.co_qualname}"
        found.names[name] += 1
        found.path.append(name)

    before = sys.getprofile()
    with none_pending():
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(before)
    return found
