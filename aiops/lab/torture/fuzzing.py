"""Coverage-guided fuzzing of `aiops.lab.torture.fuzz_targets` by Atheris (libFuzzer).

``python -m aiops.lab.torture.fuzzing TARGET CORPUS SECONDS`` adds to a folder what reaches further,
and ends with a status other than 0 at a finding, whose bytes it leaves in the folder ``findings``
beside it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from aiops.errors import UsageError
from aiops.lab.processes import clean_environment

_LONGEST = 4096  # bytes of an input
_SLOWEST = 25  # seconds for one input
_MEMORY = 2048  # MiB
_GRACE = 60.0

_RUNS = re.compile(rb"^#(\d+)\t.*?cov: (\d+)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FuzzResult:
    """The outcome for one target.

    Attributes
    ----------
    target
        Its name.
    runs, coverage
        Inputs that were tried, and edges of the code that they reached.
    seconds
        The time that it took.
    finding
        The end of what was said of an input that broke the target; empty: there was none.
    """

    target: str
    runs: int
    coverage: int
    seconds: float
    finding: str


def fuzz(target: str, corpus: Path, seconds: int) -> FuzzResult:
    """Fuzz one target in a process of its own.

    Raises
    ------
    UsageError
        When Atheris is not installed.
    """
    try:
        import atheris  # noqa: F401
    except ImportError:
        raise UsageError("fuzzing needs Atheris: pip install atheris") from None
    (corpus / target).mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", __name__, target, str(corpus), str(seconds)]
    began = time.monotonic()
    env = {
        **clean_environment(),
        "NUMBA_DISABLE_JIT": "1",
    }  # it cannot compile what is instrumented
    done = subprocess.run(
        words, check=False, capture_output=True, env=env, timeout=seconds + _GRACE
    )
    said = done.stderr
    counts = _RUNS.findall(said)
    runs, coverage = map(int, counts[-1]) if counts else (0, 0)
    finding = said.decode(errors="replace")[-4000:] if done.returncode else ""
    return FuzzResult(target, runs, coverage, round(time.monotonic() - began, 1), finding)


def main(arguments: Sequence[str]) -> None:
    """Fuzz in this process, which libFuzzer ends."""
    import atheris

    target, corpus, seconds = arguments[0], Path(arguments[1]), arguments[2]
    with atheris.instrument_imports(include=["aiops"]):
        from aiops.lab.torture.fuzz_targets import TARGETS
    findings = corpus / "findings"
    findings.mkdir(exist_ok=True)
    flags = [
        *(f"-max_total_time={seconds}", f"-max_len={_LONGEST}", f"-timeout={_SLOWEST}"),
        *(f"-rss_limit_mb={_MEMORY}", f"-artifact_prefix={findings}/{target}-"),
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus / target)], TARGETS[target])
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1:])
