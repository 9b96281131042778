"""Figures of reports that were written before: ``aiops bench plot REPORT.json ...``.

A report is drawn as its benchmark would have drawn it, next to the file, as NAME.png; nothing is
measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from aiops.errors import UsageError
from aiops.lab import drawing
from benchmarks import compare


def draw(file: Path, folder: Path | None = None, suffix: str = ".png") -> list[Path]:
    """Draw a report; return the files that were written.

    Parameters
    ----------
    file
        The report.
    folder
        Where to; None: where the report is.
    suffix
        One of `figure_style.SUFFIXES`.

    Raises
    ------
    UsageError
        When the file is no report of a benchmark of ours, or lacks something; when matplotlib is
        missing, or nothing can be written.
    """
    result = compare.read(file)
    module = compare.benchmark(result, file)
    stem = (folder or file.parent) / file.stem
    try:
        if hasattr(module, "figure"):
            return drawing.save(module.figure(result), stem, (suffix,))
        drawn: list[Path] = module.draw(result, stem)
        return drawn
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise UsageError(
            f"{file} is not a whole report of {result['benchmark']}: {error!r}"
        ) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 2 when a file cannot be drawn."""
    parser = argparse.ArgumentParser("aiops bench plot", description=__doc__.partition("\n")[0])
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT.json")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: beside the report")
    parser.add_argument("--svg", action="store_true", help="instead of .png")
    chosen = parser.parse_args(argv)
    suffix = ".svg" if chosen.svg else ".png"
    try:
        for file in chosen.reports:
            for path in draw(file, chosen.out, suffix):
                print(path)
    except UsageError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
