"""The algorithms benchmark: what each policy learns, waits for, and loses to a straggler.

    aiops bench algorithms [--parts accuracy,idle,straggler] [--only asgd,fasgd] [--seeds 3] ...

Everything runs as a user would run it: a server process, four worker processes, real TCP.

* **accuracy**: every policy, with its defaults, trains a perceptron on MNIST for ten epochs of
  samples; curves and final test accuracy over three seeds. Variants (other settings) follow.
* **idle**: workers whose gradient takes a fixed time, behind a link so slow that a merge takes as
  long as three gradients; which share of their time do they wait?
* **straggler**: one of four workers is five times slower; how much of their pace do the others
  keep?

::

    cases.py     which policies, variants, grids      accuracy.py   the three parts
    results.py   the file, which can be resumed       idle.py
    team.py      one run: processes, looks at it      straggler.py
    worker.py    a worker process                     tables.py     what is made of them
    link.py      a slow line                          plots.py
    problem.py   data and model                       command.py    the command line

This page imports nothing, so that a worker process starts quickly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; exits with 1 when a run failed, 2 when an option is wrong."""
    from benchmarks.algorithms.command import main as run

    run(argv)


def draw(result: Mapping[str, Any], stem: Path) -> list[Path]:
    """Draw a report: ``<stem>-accuracy.png``, ``-idle.png``, ``-straggler.png``."""
    from benchmarks.algorithms import plots

    return plots.save(result, stem)
