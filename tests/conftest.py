"""What every test relies on."""

import signal
from pathlib import Path

import pytest
from hypothesis import settings

_PACKAGE = Path(__file__).parents[1] / "aiops"

# A machine that does other work, or compiles a kernel first, is no failure.
settings.register_profile("aiops", deadline=None)
settings.load_profile("aiops")

# A shell without job control makes its background commands deaf to Ctrl-C, and their children too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Refuse to test what was compiled of an earlier state of the sources."""
    for compiled in _PACKAGE.rglob("*.so"):
        source = compiled.with_name(compiled.name.partition(".")[0] + ".py")
        if not source.exists() or source.stat().st_mtime > compiled.stat().st_mtime:
            pytest.exit(
                f"{source} is newer than what was compiled of it: run `make fast`, or `make plain`",
                2,
            )
