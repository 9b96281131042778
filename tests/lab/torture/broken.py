"""Servers that break their promise, each in one way, for the torture to catch."""

from __future__ import annotations

from typing import Any

from aiops.lab.torture.spawner import run_server


def acknowledges_before_it_writes(flags: list[str]) -> None:
    """Keep rows in memory after the first 60, and write them when there are 20."""
    from aiops.serving.state.journal_writer import JournalWriter

    append, rows = JournalWriter.append, []  # type: ignore[var-annotated]

    def later(self: JournalWriter, effect: Any) -> Any:
        rows.append(effect)
        if effect.number > 60 and len(rows) < 20:
            return None
        due = [*rows]
        rows.clear()
        return [append(self, row) for row in due][-1]

    JournalWriter.append = later  # type: ignore[method-assign]
    JournalWriter.exchange = lambda *_row: False  # type: ignore[method-assign]  # all are appended
    # With `durable` it would acknowledge nothing: answers wait until their rows are synced.
    run_server(["written" if flag == "durable" else flag for flag in flags])


def applies_twice(flags: list[str]) -> None:
    """Apply each tenth gradient of the steady exchanges twice."""
    from aiops.store.parameters import Store

    update, count = Store.update, [0]

    def tenth(self: Store, gradient: Any, steps: Any, scalars: Any) -> Any:
        count[0] += 1
        return update(self, gradient, steps * (1 + (count[0] % 10 == 0)), scalars)

    Store.update = tenth  # type: ignore[method-assign]
    run_server(flags)


def ends_without_a_snapshot(flags: list[str]) -> None:
    """Keep nothing of what has happened since the last snapshot, when it is asked to end."""
    from aiops.serving.run_state import RunState

    end = RunState.end
    RunState.end = lambda self, *, trusted: end(self, trusted=False)  # type: ignore[method-assign]
    flags = ["applied" if flag in ("written", "durable") else flag for flag in flags]
    run_server([*flags, "--snapshot-every", "30"])
