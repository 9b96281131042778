"""The common parts of every benchmark's report: the statistics, the tables, the files.

A report is an `aiops.lab.run_record.record` of the kind ``benchmark``; what was measured, round by
round, is under names of the benchmark's own. `benchmarks.compare` reads two of them.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import io
import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import numpy.typing as npt
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from aiops.errors import UsageError
from aiops.lab import drawing, figure_style
from aiops.lab.figures import Figure
from aiops.lab.run_record import describe, write_text
from benchmarks.sizes import format_size, parse_size, size_flag

PERCENTILES = {"p50_us": 50.0, "p90_us": 90.0, "p99_us": 99.0, "p999_us": 99.9}
"""Of latencies, by the names that they have in a report."""
PERCENTILE_NAMES = ("p50", "p90", "p99", "p99.9")
"""As people read them."""
_WIDTH = 100  # columns of a table in a file, unless its figures take more


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the least and the greatest of some figures (at least one)."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], *, text_columns: int = 1
) -> Table:
    """Make a table; the first ``text_columns`` columns are left-aligned, the others are figures.

    An empty row draws a line between sections.
    """
    made = Table(title=title, title_justify="left", header_style="bold", box=box.SIMPLE_HEAD)
    for index, name in enumerate(columns):
        made.add_column(name, justify="left" if index < text_columns else "right", no_wrap=True)
    for row in rows:
        if row:
            made.add_row(*row)
        else:
            made.add_section()
    return made


def show_table(made: RenderableType, console: Console) -> None:
    """Print a table, or a group of them, as wide as it is."""
    natural = console.measure(made, options=console.options.update(max_width=1000)).maximum
    console.width = max(console.width, natural)
    console.print(made)


def show(made: RenderableType, about: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a table, or a group of them, and the machine; figures are never cut off."""
    console = console or Console()
    show_table(made, console)
    console.print(describe(about), style="dim", highlight=False, soft_wrap=True)


THROUGHPUT = ("a second", "min-max")
"""The columns of `throughput`."""
POINTS = tuple(f"{name} µs" for name in PERCENTILE_NAMES)
"""The columns of `points`."""


def throughput(figures: Mapping[str, Any]) -> list[str]:
    """Write a contender's cycles per second, and their spread; that it failed."""
    rate = figures.get("cycles_per_second")
    if rate is None:
        return ["failed", "-"]
    return [amount(rate["median"]), f"{amount(rate['min'])}-{amount(rate['max'])}"]


def points(figures: Mapping[str, Any]) -> list[str]:
    """Write a contender's latency percentiles."""
    return [f"{figures[key]:,.0f}" if key in figures else "-" for key in PERCENTILES]


def times(figures: Mapping[str, Any], key: str) -> str:
    """Write the median of a ratio."""
    if key not in figures:
        return "-"
    ratio = float(figures[key]["median"])
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.3f}"


def amount(value: float) -> str:
    """Write a number, with as many digits as it deserves."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return one line per contender of the cells of a report that failed."""
    return [
        f"{cell['cell']}: {figures['failed']}"
        for cell in result["cells"]
        for figures in cell["contenders"].values()
        if figures["failed"]
    ]


def percentiles(seconds: npt.ArrayLike) -> dict[str, float]:
    """Return the percentiles of some latencies, in microseconds: see `PERCENTILES`."""
    points = np.percentile(np.asarray(seconds), list(PERCENTILES.values())) * 1e6
    return dict(zip(PERCENTILES, map(float, points), strict=True))


def ask_for_plots(path: Path) -> None:
    """Raise UsageError where a figure could not be drawn in the end, before anything is measured.

    The file's ending says what it becomes; matplotlib must be there.
    """
    if path.suffix not in figure_style.SUFFIXES:
        raise UsageError(f"--plot {path}: a plot is {' or '.join(figure_style.SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("plots need matplotlib: pip install 'aiops-ps[demo]'")


def command(
    options: Any,
    run: Callable[[Any, Callable[[str], None]], dict[str, Any]],
    shown: Callable[[dict[str, Any]], RenderableType],
    argv: Sequence[str] | None,
    **how: Any,
) -> None:
    """Run a benchmark from the command line, whose flags are the fields of its options.

    Parameters
    ----------
    options
        A dataclass of the standard options, in the benchmark's module. A field is annotated with
        its type and its help, ``Annotated[int, "per worker"]``, and perhaps a function that reads
        it, or each part of a list. A list is written with commas; ``none`` is an empty one.
    run
        Takes the options and `log`, and returns the report.
    shown, argv, how
        As for `main`.
    """
    module = sys.modules[type(options).__module__]
    parser = argparse.ArgumentParser(
        f"aiops bench {Path(module.__file__ or '').stem}",
        description=(module.__doc__ or "").partition("\n")[0],
    )
    hints, lists = get_type_hints(type(options), include_extras=True), {}
    for field in dataclasses.fields(options):
        hint, default = hints[field.name], getattr(options, field.name)
        text, read = (*getattr(hint, "__metadata__", ()), "", None)[:2]
        kind = get_args(hint)[0] if text else hint
        size = read in (parse_size, size_flag)
        word = (lambda n: format_size(n).replace(" ", "")) if size else str
        given: dict[str, Any]
        if isinstance(default, tuple):
            lists[field.name] = read or get_args(kind)[0]
            given = {"default": ",".join(map(word, default)) or "none", "metavar": "A,B,..."}
        elif isinstance(default, bool):
            given = {"default": default, "action": argparse.BooleanOptionalAction}
        else:
            given = {"default": word(default), "type": read or kind}
        flag, shown_as = "--" + field.name.replace("_", "-"), f"(default {given['default']})"
        parser.add_argument(flag, help=f"{text} {shown_as}".strip(), **given)

    def measure(chosen: dict[str, Any]) -> dict[str, Any]:
        return run(dataclasses.replace(options, **chosen), log)

    main(parser, measure, shown, argv, lists, **how)


def main(
    parser: argparse.ArgumentParser,
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    shown: Callable[[dict[str, Any]], RenderableType],
    argv: Sequence[str] | None,
    lists: Mapping[str, Callable[[str], Any]] | None = None,
    *,
    drawn: Callable[[dict[str, Any]], Figure] | None = None,
    failures: Callable[[dict[str, Any]], Sequence[str]] = lambda result: (),
    notes: Callable[[dict[str, Any]], Iterable[str]] = lambda result: (),
    near: Callable[[dict[str, Any]], bool] = lambda result: False,
) -> None:
    """Run a benchmark from the command line.

    It exits with 1 when something failed, with 2 when an option is wrong, with 130 at Ctrl-C.

    Parameters
    ----------
    parser
        Of its options; ``--json FILE`` is added, ``--plot FILE`` if it can be drawn, and ``--out``,
        a folder for both and for the table, which are named like the benchmark.
    measure
        Takes the options, and returns the report.
    shown
        Lays the report out.
    argv
        The command line; None: the process's.
    lists
        Options that hold several values with commas between, and what reads one of them.
    drawn
        Makes a figure of the report.
    failures
        Says in a line each what failed.
    notes
        Says in a line each what is to be printed below the table.
    near
        Tells whether it was measured in shared memory instead of over TCP; files are named so.
    """
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure to FILE")
    if drawn:
        parser.add_argument("--plot", type=Path, metavar="FILE", help="draw it: .png or .svg")
    what = ".json, .txt and .png" if drawn else ".json and .txt"
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help=f"write {what} of its name there"
    )
    chosen = vars(parser.parse_args(argv))
    path, plot, out = chosen.pop("json"), chosen.pop("plot", None), chosen.pop("out")
    with ended_in_order(parser):
        if plot or (out and drawn):
            ask_for_plots(plot or out / "plot.png")
        if out:
            make(out)
        for file in filter(None, (path, plot)):
            if not file.parent.is_dir():
                raise UsageError(f"{file} cannot be written: there is no folder {file.parent}")
        for name, read in (lists or {}).items():
            chosen[name] = tuple(_each(name, chosen[name], read))
        result = measure(chosen)
    stem = out / (result["benchmark"] + "-same-host" * near(result)) if out else None
    for file in filter(None, (path, stem and stem.with_suffix(".json"))):
        write_text(file, json.dumps(result, indent=2) + "\n")
    if drawn:
        for file in filter(None, (plot, stem and stem.with_suffix(".png"))):
            drawing.save(drawn(result), file.with_suffix(""), (file.suffix,))
    _print(Console(), shown, notes, result)
    if stem:
        written = io.StringIO()
        _print(Console(file=written, width=_WIDTH), shown, notes, result)
        lines = (line.rstrip() for line in written.getvalue().splitlines())
        stem.with_suffix(".txt").write_text("\n".join([*lines, ""]))
    if failed := failures(result):
        print("failed:", *failed, sep="\n  ")
        raise SystemExit(1)


def _print(
    console: Console,
    shown: Callable[[dict[str, Any]], RenderableType],
    notes: Callable[[dict[str, Any]], Iterable[str]],
    result: dict[str, Any],
) -> None:
    show(shown(result), result["machine"], console)
    for line in notes(result):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def make(folder: Path) -> None:
    """Make a folder where there is none; UsageError when that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--out {folder} is no folder to write to: {error.strerror}") from None


def _each(name: str, text: str, read: Callable[[str], Any]) -> Iterable[Any]:
    """Read each part of what has commas between; ``none`` has no parts."""
    for part in text.split(",") if text not in ("", "none") else ():
        try:
            yield read(part.strip())
        except UsageError:
            raise
        except ValueError:
            flag = "--" + name.replace("_", "-")
            raise UsageError(
                f"{flag} {text}: {part.strip()!r} is no number; write them like 1,4"
            ) from None


@contextmanager
def ended_in_order(parser: argparse.ArgumentParser) -> Iterator[None]:
    """Exit with 2 after a UsageError, with 130 after Ctrl-C and with 143 after SIGTERM.

    On the way out all processes are ended.
    """

    def stop(*_: object) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except ValueError as error:  # a UsageError is one
        parser.error(str(error))
    except KeyboardInterrupt:
        print("interrupted; all processes are ended", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)


def log(line: str) -> None:
    """Tell on stderr how far it is."""
    print(line, file=sys.stderr, flush=True)
