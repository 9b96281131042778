"""``python -m docs._tools.state docs/state.md``: bring the page up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs._tools.state.page import update


def main() -> None:
    """Rewrite the marked blocks of the page named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.state", description=main.__doc__)
    parser.add_argument("page", nargs="?", type=Path, default=Path("docs/state.md"))
    update(parser.parse_args().page)


if __name__ == "__main__":
    main()
