"""Make the report that ``aiops stats`` shows."""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

from aiops.errors import StaleGradient

if TYPE_CHECKING:
    from aiops.engine.engine import Engine


class Pace:
    """Updates per second over the last ten seconds or so."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[float, int]] = deque(maxlen=12)  # (time, version then)
        self.due = -math.inf  # when a version is to be noted again

    def note(self, now: float, version: int) -> None:
        """Note the version at a time; more than once a second is ignored."""
        if now >= self.due:
            self._seconds.append((now, version))
            self.due = now + 1

    def rate(self, now: float, version: int) -> float:
        """Return updates per second."""
        if not self._seconds:
            return 0.0
        since, before = self._seconds[0]
        return (version - before) / max(now - since, 1e-9)


def report(engine: Engine, now: float) -> dict[str, Any]:
    """Return an engine's statistics, plain values all the way down; ``now`` in its seconds."""
    store, updates, answers = engine.store, engine.updates, engine.answers
    pool, rows, delta_replies = engine.intake.pool, engine.intake.answers, answers.delta_replies
    workers, without_line = engine.crew.lines(now)
    used, vbar = sum(updates.staleness.values()), store.vbar() if store else None
    return {
        "policy": engine.algorithm.name,
        "settings": engine.algorithm.settings(),
        "version": answers.version,
        "seconds": round(now - engine.started, 3),
        "updates_per_second": round(engine.pace.rate(now, answers.version), 3),
        "gradients": used,
        "refused": dict(answers.refused),
        "ignored": updates.ignored,
        "wasted": updates.ignored + answers.refused[StaleGradient.code],
        "staleness": {str(tau): n for tau, n in sorted(updates.staleness.items())},
        "mean_staleness": updates.total_staleness / max(used, 1),
        "vbar": vbar,
        "parameters": store.layout.parameters if store else 0,
        "tensors": len(store.layout.tensors) if store else 0,
        "tables": [table.report() for table in engine.tables],
        "kernels": store.backend if store else "",
        "device": engine.device,
        "versions_alive": store.alive if store else 0,
        "versions_spare": store.spare if store else 0,
        "versions_copied": store.copies if store else 0,
        "receive_bytes": pool.out,
        "receive_bytes_peak": pool.peak,
        "rows_bytes": rows.out,
        "rows_bytes_peak": rows.peak,
        "waiting": len(updates.held),
        "waited_for": sorted(engine.crew.waited_for()),
        "shadow": delta_replies.shadow.report() if delta_replies else None,
        "averages": engine.meeting.report(),
        "ledger": engine.crew.ledger(),
        "budget": engine.budget.report(vbar) if engine.budget else None,
        "profile": engine.profile() if engine.profile else None,
        "file_errors": engine.file_errors(),
        "workers": workers,
        "departed_more": without_line,
    }
