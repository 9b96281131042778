"""Why no pushes are taken."""

from __future__ import annotations

from aiops.engine.events import Stopping
from aiops.engine.push_closure import PushClosure
from tests.rows import each_row


def test_pushes_are_taken_at_first_and_after_a_pause() -> None:
    closure = PushClosure()
    assert closure.why == ""
    closure.pause("disk full.")
    assert closure.why == "the server takes no pushes at present: disk full."
    closure.pause("")
    assert closure.why == ""


def test_the_end_outweighs_a_pause_that_outlasts_it() -> None:
    closure = PushClosure()
    closure.pause("disk full.")
    closure.end(Stopping(1.0))
    assert closure.why == "the server is shutting down and takes no more pushes"
    closure.end(None)
    assert closure.why.endswith("disk full.")


@each_row("paused", ["", "disk full."])
@each_row("ending", [None, Stopping(1.0, kept=True)])
def test_it_goes_on_from_its_state(ending: Stopping | None, paused: str) -> None:
    closure, other = PushClosure(), PushClosure()
    closure.pause(paused)
    closure.end(ending)
    other.restore(closure.state())
    assert (other.paused, other.ending, other.why) == (paused, ending, closure.why)
