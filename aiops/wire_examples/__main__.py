"""``python -m aiops.wire_examples docs/wire.md``: bring the page up to date."""

from __future__ import annotations

import sys
from pathlib import Path

from aiops.wire_examples.page import update


def main() -> None:
    """Rewrite the pages named on the command line."""
    for path in sys.argv[1:] or ["docs/wire.md"]:
        update(Path(path))


if __name__ == "__main__":
    main()
