"""The style of every figure: colours, matplotlib's settings, how numbers are written, files.

The demo, the experiments, the benchmarks and the pages of the documentation draw with it.
matplotlib is imported when a figure is made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiops.errors import UsageError

# Okabe and Ito, "Color universal design", 2008: colours that the colour-blind tell apart. Their
# yellow is too pale for a line.
BLUE, ORANGE, GREEN = "#0072b2", "#d55e00", "#009e73"
COLOURS = (BLUE, ORANGE, GREEN, "#cc79a7", "#e69f00", "#56b4e9", "#000000")
INK, GREY, PALE = "#2b2b2b", "#8c8c8c", "#d9d9d9"
DASHES = ("-", "--", "-.", ":")
MARKERS = "os^D"

STYLE: Mapping[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelcolor": INK,
    "axes.edgecolor": GREY,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "lines.linewidth": 1.6,
    "lines.markersize": 3.0,
    "legend.frameon": False,
    "svg.hashsalt": "aiops",
}
"""matplotlib's settings."""

DPI = 200
SUFFIXES = (".png", ".svg")


@contextmanager
def figure(size: tuple[float, float] | None = None, **style: Any) -> Iterator[Any]:
    """Yield an empty matplotlib figure in this style; draw and `save` it within the block.

    Parameters
    ----------
    size
        Width and height in inches; None: the caller sets it.
    style
        matplotlib settings that differ, ``__`` for each dot: ``font__size=8.0``.

    Raises
    ------
    UsageError
        When matplotlib is missing.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError("figures need matplotlib: pip install 'aiops-ps[demo]'") from None
    changes = {name.replace("__", "."): value for name, value in style.items()}
    with matplotlib.rc_context({**STYLE, **changes}):
        made = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(made)
        yield made


def save(made: Any, path: Path) -> Path:
    """Write a figure; equal figures are equal files.

    Raises
    ------
    UsageError
        When the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _lay_out(made)
        made.savefig(path, dpi=DPI, metadata={"Date": None} if path.suffix == ".svg" else None)
        if path.suffix == ".png":
            from PIL import Image  # matplotlib brings it

            with Image.open(path) as image:  # a palette makes the file a quarter as large
                small = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
            small.save(path, optimize=True, dpi=(DPI, DPI))
    except OSError as error:
        raise UsageError(
            f"the figure {path} cannot be written: {error.strerror}", output=str(path)
        ) from None
    return path


def _lay_out(made: Any) -> None:
    """Give a figure's parts their places, once for all its files.

    `savefig` would lay it out, draw it in vain, lay it out and draw it, for each file again.
    """
    engine = made.get_layout_engine()
    if engine is None:
        return
    made.set_dpi(DPI)
    for _ in range(2):  # the labels of an axis depend on the room that it got
        engine.execute(made)
    made.set_layout_engine(None)


def title(made: Any, text: str, size: float = 11.0) -> None:
    """Write a figure's title, at the left."""
    made.suptitle(text, x=0.012, ha="left", fontsize=size, fontweight="bold", color=INK)


def colour(number: int) -> str:
    """Return the colour of the curve of that number; they repeat."""
    return COLOURS[number % len(COLOURS)]


def dashes(number: int) -> str:
    """Return the dashes of the curve of that number: others once the colours repeat."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def marker(number: int) -> str:
    """Return the marker of the point of that number: another once the colours repeat."""
    return MARKERS[number // len(COLOURS) % len(MARKERS)]


def thousands(value: float, _position: Any = None) -> str:
    """Write a number of an axis with commas."""
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"


def sparse(value: float, _position: Any = None) -> str:
    """Write the numbers 1, 2 and 5 of each decade of a logarithmic axis, and no others."""
    return f"{value:g}" if f"{value:e}"[0] in "125" else ""


def short(value: float, _position: Any = None) -> str:
    """Write a number of an axis in thousands or millions."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e3 else f"{value:g}"
