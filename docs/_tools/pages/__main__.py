"""``python -m docs._tools.pages docs/algorithms``: write the pages, and draw what was measured.

docs/experiments.md is written as well.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from aiops.cli.policy_catalog import built_in, neighbours
from aiops.errors import AiopsError
from docs._tools.pages import experiments
from docs._tools.pages.curves import Curves
from docs._tools.pages.markdown import pages
from docs._tools.pages.plots import draw_all

RESULTS = Path("results", "algorithms.json")
"""The learning curves, beside the folder of the pages."""

EXPERIMENTS = Path("experiments.md")
"""The page about experiments, beside it as well."""


def update(folder: Path) -> None:
    """Write every page into a folder, and remove pages of what is gone.

    Parameters
    ----------
    folder
        Of the pages; ``../results/algorithms.json`` holds the curves, if there are any.

    Raises
    ------
    UsageError
        When the curves cannot be read, or matplotlib is needed and missing.
    """
    curves = Curves.read(folder.parent / RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    texts = pages(curves)
    for old in folder.glob("*.md"):
        if old.name not in texts:
            old.unlink()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    (folder.parent / EXPERIMENTS).write_text(experiments.page(), encoding="utf-8")
    images = folder / "img"
    for old in images.glob("*.png"):
        old.unlink()
    if curves is not None:
        compared = {name: neighbours(kind) for name, kind in built_in().items()}
        draw_all(curves, compared, images)


def main() -> None:
    """Write the pages into the folder named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m docs._tools.pages", description=main.__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("docs/algorithms"))
    try:
        update(parser.parse_args().folder)
    except AiopsError as error:
        print(f"docs._tools.pages: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
