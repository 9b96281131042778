"""The server: ``python -m aiops.server --policy fasgd``, or `serve` inside an event loop.

The shell itself is `aiops.serving.server`, the command line `aiops.cli.serve`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":  # before NumPy is imported
    from aiops.cli import starting

    starting.begin()

from aiops.serving.embedded import serve
from aiops.serving.server import Server
from aiops.serving.standby.server import StandbyServer

__all__ = ["Server", "StandbyServer", "serve"]


def _main() -> None:
    from aiops.cli.extras import missing_package_named, print_version

    if print_version(sys.argv[1:]):
        return
    with missing_package_named("server"):
        from aiops.cli.main import server_main

        server_main()


if __name__ == "__main__":
    _main()
