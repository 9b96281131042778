"""``python -m docs._tools.metrics docs/guide-monitoring.md``: bring the page's table up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs._tools.metrics.page import update


def main() -> None:
    """Rewrite the marked block of the page named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.metrics", description=main.__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/guide-monitoring.md"))
    update(parser.parse_args().page)


if __name__ == "__main__":
    main()
