"""Measure each example of this folder: alone, and through a server with one worker.

::

    python examples/frameworks

Alone is the same file, in which each line marked ``# aiops: was ...`` is as it was, and each that
is marked ``# aiops`` is left out. The server's settings are those of the command at the file's top,
which are the defaults of most. Prints a table.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
_WAS = re.compile(r"^(\s*).*  # aiops: was (.*)$")


def marked(text: str) -> list[str]:
    """Return the lines of an example that are aiops'."""
    return [line for line in text.splitlines() if re.search(r"  # aiops(: was .*)?$", line)]


def alone(text: str) -> str:
    """Return an example as it is without aiops."""
    found = []
    for line in text.splitlines():
        if was := _WAS.match(line):
            line = was[1] + was[2]
        elif line.endswith("  # aiops"):
            continue
        found.append(line)
    return "\n".join(found) + "\n"


def settings(text: str) -> list[str]:
    """Return the flags of the server in the command at an example's top."""
    command = re.search(r"aiops run --workers \d+ (.*?)examples/", text, re.DOTALL)
    return command[1].replace("\\\n", " ").split() if command else []


def measure(example: Path) -> tuple[str, str]:
    """Return what an example prints last, alone and through a server."""
    with tempfile.TemporaryDirectory() as folder:
        file, text = Path(folder) / example.name, example.read_text("utf-8")
        file.write_text(alone(text), "utf-8")
        without = _last([sys.executable, str(file)])
    command = [sys.executable, "-m", "aiops", "run", "--workers", "1"]
    return without, _last([*command, *settings(text), str(example)])


def _last(command: Sequence[str]) -> str:
    """Return the last line that a program prints on its standard output, or its worker does."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}:\n{done.stdout}{done.stderr}")
    lines = [line for line in done.stdout.splitlines() if not line.startswith("[server]")]
    return lines[-1].removeprefix("[0] ")


def main(names: Sequence[str]) -> int:
    """Print a table of the examples that are named, or of all."""
    print("| example | lines | alone | one worker at a server |\n|---|---|---|---|")
    for example in sorted(HERE.glob("[!_]*.py")):
        if names and example.stem not in names:
            continue
        lines = len(marked(example.read_text("utf-8")))
        print(f"| {example.stem} | {lines} | {' | '.join(measure(example))} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
