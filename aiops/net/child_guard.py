"""Run a child process that ends when its parent does.

``python -m aiops.net.child_guard MODULE ARGUMENTS...`` runs a module as such a child.

A process that is killed outright cannot end its children. So the child holds the reading end of a
pipe whose writing end only the parent has: its own standard input. However the parent ends, the
system closes the pipe, and the child, which watches for that, ends too.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading


class ChildGuard:
    """Watches standard input: its first line is the word to go, its end ends the process."""

    def __init__(self) -> None:
        self._line_received = threading.Event()
        thread = threading.Thread(target=self._watch, name="aiops-child-guard", daemon=True)
        thread.start()

    def wait_for_line(self, seconds: float) -> bool:
        """Return whether the parent wrote a line within ``seconds``."""
        return self._line_received.wait(seconds)

    def _watch(self) -> None:
        # os.read, since a thread blocked in sys.stdin would hold its lock when the process ends.
        while os.read(0, 64):
            self._line_received.set()
        os._exit(1)


def main() -> None:
    """Run a module as ``python -m`` does, under a `ChildGuard`."""
    del sys.argv[0]
    ChildGuard()
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
