"""``python -m aiops`` and the ``aiops`` command."""

from __future__ import annotations

import sys

from aiops.cli import starting


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        starting.begin()
    from aiops.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
