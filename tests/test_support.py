"""What the helpers say when a test has waited in vain."""

from __future__ import annotations

import pytest

from tests.peers import eventually
from tests.support import Process


def test_a_process_that_does_not_end_in_time_shows_what_it_has_printed() -> None:
    text = (
        "import sys, threading; sys.stderr.write('why\\n'); print('on'); threading.Event().wait()"
    )
    process = Process("-c", text, env={"PYTHONUNBUFFERED": "1"})

    def is_shown() -> bool:
        with pytest.raises(AssertionError, match=r"it has not ended after 0\.05 s; std") as late:
            process.end(0.05)
        return "why\n" in str(late.value)

    try:
        assert process.line() == "on"
        eventually(is_shown, "the error has what was printed")
    finally:
        process.kill()
