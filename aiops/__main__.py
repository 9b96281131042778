"""``python -m aiops`` and the ``aiops`` command."""

from __future__ import annotations


def main() -> None:
    """Run the command line."""
    from aiops.cli import main as run

    run()


if __name__ == "__main__":
    main()
