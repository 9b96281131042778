"""``python -m aiops`` and the ``aiops`` command."""

from __future__ import annotations

import sys

from aiops.cli import starting
from aiops.cli.extras import missing_package_named, print_version


def main() -> None:
    """Run the command line."""
    if print_version(sys.argv[1:]):
        return
    serves = sys.argv[1:2] == ["serve"]
    if serves:
        starting.begin()
    with missing_package_named("server" if serves else None):
        from aiops.cli.main import main as run

        run()


if __name__ == "__main__":
    main()
