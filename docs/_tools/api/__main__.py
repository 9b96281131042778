"""``python -m docs._tools.api docs/api.md``: bring the page's list of names up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs._tools.api.page import update


def main() -> None:
    """Rewrite the marked block of the page named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.api", description=main.__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/api.md"))
    update(parser.parse_args().page)


if __name__ == "__main__":
    main()
