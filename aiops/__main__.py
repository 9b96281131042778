"""``python -m aiops`` and the ``aiops`` command."""

from __future__ import annotations

import sys

from aiops.net.cpu_count import leave_blas_alone


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["serve"]:
        leave_blas_alone()
    from aiops.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
