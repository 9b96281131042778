"""Make the report that ``aiops stats`` shows.

Most of it is state: it follows from the events, and a replay of them reports the same (`decided`).
The rest tells how this server has done it: bytes of connections, buffers, time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiops.bandwidth.gate_controller import GateController
from aiops.common.gathering import Gathering
from aiops.engine.admission import Admission
from aiops.engine.membership import Membership
from aiops.engine.rendezvous import Rendezvous
from aiops.engine.staleness import StalenessHistogram
from aiops.engine.training import Training
from aiops.errors import StaleGradient

_OF_THE_PROCESS = (
    *(
        "profile",
        "memory",
        "file_errors",
        "waits",
        "corrupted",
        "state",
        "tokens",
        "aiops",
        "time",
        "schedule",
        "kernels",
        "device",
        "versions_alive",
        "versions_spare",
    ),
    *(
        "logged",
        "readers_cut",
        "receive_bytes",
        "receive_bytes_peak",
        "rows_bytes",
        "rows_bytes_peak",
    ),
)
_OF_CONNECTIONS = (
    *("bytes", "messages", "model", "other", "overhead", "overhead_by_kind", "unfinished"),
    *("bytes_pushed", "bytes_fetched", "rolled_back"),
    *("compute_seconds", "idle_seconds", "logged"),
)


def decided(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what follows from the events: a replay of them reports the same.

    Left out are the settings and the state of the process (kernels, buffers, versions that readers
    hold), and the bytes and messages of connections, which cross when there is no event.
    """
    found = _without(report, _OF_THE_PROCESS)
    ledger = _without(report["ledger"], ("observers",))
    for direction in ("pushed", "fetched"):
        ledger[direction] = _without(ledger[direction], _OF_CONNECTIONS)
    found["ledger"] = ledger
    found["workers"] = [_without(line, _OF_CONNECTIONS) for line in report["workers"]]
    return found


def _without(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def report(
    training: Training | None,
    membership: Membership,
    admission: Admission,
    rendezvous: Rendezvous,
    budget: GateController | None,
    *,
    device: str,
    now: float,
    started: float,
    shown: int | None = None,
) -> Gathering[dict[str, Any]]:
    """Return an engine's statistics, plain values all the way down; times in its seconds.

    It pauses after each slice of its clients, and gathers the rest at one moment, behind them.

    ``shown``: the most workers that have a line, of those that are connected, in a report that
    metrics are made of (`Membership.present_lines`); None: all, and those that have left lately.
    """
    if shown is None:
        lines, without_line = membership.lines(now)
        members: dict[str, Any] = {"workers": lines, "departed_more": without_line}
    else:
        members = yield from membership.present_lines(now, shown)
        members["by_tensor"] = _by_tensor(training)
    ledger = yield from membership.gather_ledger(tensors=shown is None)
    updates = training.updates if training else None
    store = training.store if training else None
    delta_replies = training.delta_replies if training else None
    screen = training.screen if training else None
    version, vbar = (store.version, store.vbar()) if store else (0, None)
    staleness = updates.maker.staleness if updates else StalenessHistogram()
    used = sum(staleness.bins.values())
    ignored = updates.ignored if updates else 0
    return {
        "version": version,
        "seconds": round(now - started, 3),
        "schedule": _schedule(training),
        "rate_gain": updates.maker.numbers.gain.factor if updates else 1.0,
        "updates_per_second": round(updates.pace.rate(now, version), 3) if updates else 0.0,
        "gradients": used,
        "refused": dict(membership.refused),
        "ignored": ignored,
        "wasted": ignored + membership.refused[StaleGradient.code],
        "staleness": {str(t): n for t, n in sorted(staleness.bins.items())},
        "mean_staleness": staleness.total / max(used, 1),
        "vbar": vbar,
        "parameters": store.layout.parameters if store else 0,
        "tensors": len(store.layout.tensors) if store else 0,
        "tables": [t.report() for t in training.table_requests.stores] if training else [],
        "kernels": store.backend if store else "",
        "device": device,
        "versions_alive": store.alive if store else 0,
        "versions_spare": store.spare if store else 0,
        "readers_cut": training.readers_cut if training else 0,
        "receive_bytes": admission.pool.out,
        "receive_bytes_peak": admission.pool.peak,
        "rows_bytes": admission.row_pool.out,
        "rows_bytes_peak": admission.row_pool.peak,
        "logged": membership.logged.summary(now),
        "waiting": len(updates.held.pushes) if updates else 0,
        "waited_for": sorted(membership.waited_for()),
        "filter": screen.report({each.number: each.name for each in membership})
        if screen
        else None,
        "delta_replica": delta_replies.replica.report() if delta_replies else None,
        "averages": rendezvous.report(),
        "data_sets": training.data_sets.report() if training else [],
        "ledger": ledger,
        "budget": budget.report(vbar) if budget else None,
        **members,
    }


def _by_tensor(training: Training | None) -> dict[str, Any] | None:
    """Return lists with a value for each tensor, in the model's order; None without a model.

    ``names``; ``sizes``, in parameters; ``vbar``, the rule's statistic, if it has one; ``norm``, a
    usual gradient's, and the ``largest`` of its values, if a filter compares norms.
    """
    if training is None:
        return None
    layout, screen = training.store.layout, training.screen
    means = np.frombuffer(training.store.vbars(), "<f4").tolist()
    usual = screen.norms() if screen else None
    return {
        "names": [tensor.name for tensor in layout.tensors],
        "sizes": layout.sizes.tolist(),
        "vbar": means or None,
        "norm": usual and usual[:-1],
        "largest": usual and usual[-1],
    }


def _schedule(training: Training | None) -> float | None:
    """Return the position of the newest update in a schedule that does not count updates."""
    position = training.updates.maker.position if training is not None else None
    return None if position is None else position.at()
