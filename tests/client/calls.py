"""Python calls of a piece of code, counted with a profile hook: what a ratchet can hold to.

A time says how fast the machine was; a count says how much code a message goes through, and is the
same every time. ``python -m tests.client.calls`` prints where the calls of a client's exchange are.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = str(Path(__file__).parents[2])


@dataclass
class Calls:
    """The calls of one run of a function.

    Attributes
    ----------
    python
        Python functions entered, generators resumed included.
    c
        Functions of C called.
    by
        Python calls by (file, function).
    entered
        Files entered from another one.
    """

    python: int = 0
    c: int = 0
    by: Counter[tuple[str, str]] = field(default_factory=Counter)
    entered: int = 0
    files: set[str] = field(default_factory=set)


def counted(function: Callable[..., object], *given: Any) -> Calls:
    """Call a function with what is given; return the calls on this thread, its own included."""
    found = Calls()
    with counting(found):
        function(*given)
    return found


@contextlib.contextmanager
def counting(found: Calls) -> Iterator[None]:
    """Add what is called on this thread meanwhile."""

    def hook(frame: FrameType, event: str, arg: Any) -> None:
        if event == "call":
            file = frame.f_code.co_filename.removeprefix(ROOT).lstrip("/")
            found.python += 1
            found.by[file, frame.f_code.co_name] += 1
            found.files.add(file)
            caller = frame.f_back
            if caller is None or caller.f_code.co_filename != frame.f_code.co_filename:
                found.entered += 1
        elif event == "c_call":
            found.c += 1

    sys.setprofile(hook)
    try:
        yield
    finally:
        sys.setprofile(None)
        found.c -= 1  # sys.setprofile itself
        found.python -= 2  # the end of this, and of what contextlib makes of it
        found.entered -= 2
        for own in [key for key in found.by if key[1] == "counting" or "contextlib" in key[0]]:
            del found.by[own]


def median(function: Callable[..., object], *given: Any, times: int = 9) -> Calls:
    """Return the run with the median number of Python calls."""
    runs = sorted((counted(function, *given) for _ in range(times)), key=lambda run: run.python)
    middle = statistics.median_low(run.python for run in runs)
    return next(run for run in runs if run.python == middle)


def main() -> None:
    """Print the calls of one exchange of a client with a server in another process."""
    import numpy as np

    import aiops
    from tests.support import server_process

    model = {"w": np.zeros(1024, np.float32)}
    gradient = {"w": np.ones(1024, np.float32)}
    server = server_process("--policy", "asgd", "--set", "lr=0.1")
    with server as process, aiops.Worker(process.url, model) as worker:
        for _ in range(20):
            worker.step(gradient)
        found = median(worker.step, gradient)
    print(f"{found.python} Python calls, {found.c} of C; {found.entered} times into another file")
    for (file, name), count in found.by.most_common():
        print(f"{count:4}  {file}:{name}")


if __name__ == "__main__":
    main()
