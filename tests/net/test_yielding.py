"""Short turns while something long is done on a thread: `aiops.net.yielding`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from aiops.net.yielding import yielding


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_turns_are_short_while_it_lasts_and_as_before_afterwards() -> None:
    sys.setswitchinterval(0.004)
    with yielding():
        assert sys.getswitchinterval() == pytest.approx(50e-6)
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_the_last_of_several_puts_back_what_the_first_found() -> None:
    sys.setswitchinterval(0.004)
    first, second = yielding(), yielding()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(50e-6)
    second.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_a_failure_puts_it_back_too() -> None:
    sys.setswitchinterval(0.004)
    with pytest.raises(RuntimeError, match="no compiler"), yielding():
        raise RuntimeError("no compiler")
    assert sys.getswitchinterval() == pytest.approx(0.004)


def test_who_asked_for_shorter_turns_still_keeps_them() -> None:
    sys.setswitchinterval(10e-6)
    with yielding():
        assert sys.getswitchinterval() == pytest.approx(10e-6)
    assert sys.getswitchinterval() == pytest.approx(10e-6)
