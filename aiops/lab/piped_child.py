"""The child of a `aiops.lab.processes.PipedProcess`: ``python -m aiops.lab.piped_child FD``.

It receives the parent's `sys.path` and a function over the pipe FD, and calls the function with it.
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection


def main() -> None:
    """Call the function that the parent names."""
    pipe = Connection(int(sys.argv[1]))
    sys.path[:] = pipe.recv()
    target = pipe.recv()
    target(pipe)


if __name__ == "__main__":
    main()
