"""``python -m docs._tools.api.types``: whether a type checker knows the type of each public name.

It runs ``basedpyright --verifytypes``, which looks at all of the package, and reads of its report
what concerns the names and members on docs/api.md. A class is judged by these members: its internal
ones may be of types that are only inferred. So is a parameter or a result whose type is such a
class. What PyTorch, Keras and Ray leave untyped cannot be typed here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from docs._tools.api.surface import MODULES, members, names

ROOT = Path(__file__).parents[3]

_FOREIGN = {"aiops.ray.training.train"}
"""Names with a type of a package that does not declare it: Ray's `Result`."""

_BEHIND = ("Remote", "Stamped")
"""What parameters are called by that take public classes: their base, and a union of them."""

_ABOVE = re.compile(r"Type of (?:metaclass|base class) ")
_TYPE = re.compile(r'(?:Parameter|Return) type is "([^"]*)"')


def report() -> Mapping[str, Any]:
    """Run the checker; return its report.

    Raises
    ------
    SystemExit
        When it is not installed, or has failed.
    """
    words = [sys.executable, "-m", "basedpyright", "--verifytypes", "aiops", "--ignoreexternal"]
    words += ["--outputjson", "--pythonpath", sys.executable]
    with tempfile.TemporaryDirectory() as elsewhere:  # in the repository it finds no package
        done = subprocess.run(
            words,
            cwd=elsewhere,
            env={"PYTHONPATH": str(ROOT), "PATH": str(Path(sys.executable).parent)},
            capture_output=True,
            text=True,
            check=False,
        )
    try:
        found: Mapping[str, Any] = json.loads(done.stdout)["typeCompleteness"]
    except (ValueError, KeyError):
        raise SystemExit(f"basedpyright has failed: {done.stderr or done.stdout}") from None
    return found


def public_symbols(modules: Sequence[str]) -> tuple[set[str], set[str]]:
    """Return the symbols of the public names, as the checker calls them, and the classes' names."""
    wanted, classes = set(), set(_BEHIND)
    for name in names(modules):
        if not isinstance(name.value, type):
            wanted.add(name.home)
            continue
        classes.add(name.name)
        listed = {"__init__", *(member for member, _ in members(name.value))}
        wanted |= {
            f"{each.__module__}.{each.__qualname__}.{member}"
            for each in name.value.__mro__
            if each.__module__.partition(".")[0] == "aiops"
            for member in listed
        }
    return wanted - _FOREIGN, classes


def unknown(found: Mapping[str, Any], modules: Sequence[str] = MODULES) -> tuple[int, list[str]]:
    """Return how many public symbols a report has, and a line about each of unknown type."""
    wanted, classes = public_symbols(modules)
    symbols = [symbol for symbol in found["symbols"] if symbol["name"] in wanted]
    lines = []
    for symbol in symbols:
        if symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]:
            continue
        lines += [
            f"{symbol['name']}: {' '.join(text.split())}"
            for text in _faults(symbol["diagnostics"], classes)
        ]
    return len(symbols), lines


def _faults(diagnostics: list[Mapping[str, Any]], classes: set[str]) -> Iterator[str]:
    for each in diagnostics:
        text = each["message"]
        shown = _TYPE.search(text)
        if shown and set(re.findall(r"\w+", shown[1])) <= classes | {"None"}:
            continue
        if not _ABOVE.match(text):
            yield text


def main() -> None:
    """Print the public names of unknown type; the exit status is 1 if there are some."""
    count, lines = unknown(report())
    print(*lines, f"{count} public symbols, {len(lines)} faults", sep="\n")
    if lines or not count:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
