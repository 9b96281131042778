"""``python -m docs._tools.wire docs/wire.md``: bring the wire's pages and vectors up to date."""

from __future__ import annotations

import argparse
from pathlib import Path

from docs._tools.wire.page import update


def main() -> None:
    """Rewrite the wire's pages beside the docs/wire.md named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.wire", description=main.__doc__)
    parser.add_argument("page", nargs="*", type=Path, default=[Path("docs/wire.md")])
    for path in parser.parse_args().page:
        update(path)


if __name__ == "__main__":
    main()
