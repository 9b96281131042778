"""Seeds of the sweeps: few in the suite, and as many more as are asked for.

``AIOPS_SEEDS=10 make test`` tries ten times as many. A seed that has failed once gets a test of its
own, or a line in a list beside the sweep.
"""

from __future__ import annotations

import os

TIMES = int(os.environ.get("AIOPS_SEEDS", "1"))


def seeds(count: int) -> range:
    """Return the seeds of a sweep, which are so many unless more are asked for."""
    return range(count * TIMES)
