"""Plan what a server's clients do: the algorithm's plan, with a gate, codecs and deadlines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiops.algorithms.base import Algorithm
from aiops.bandwidth import gates
from aiops.bandwidth.gate_controller import GateController
from aiops.bandwidth.gates import Gate
from aiops.bandwidth.round_spacing import worker_rate
from aiops.bandwidth.shares import check_shares
from aiops.codecs.choice import CodecChoice
from aiops.engine.events import Options
from aiops.errors import ConflictError

LOG_EVERY, LOGS_PER_SECOND = 2.0, 25
"""Seconds between two messages of a worker that is watched; and about the most a second of all."""

RING_CODECS = ("bf16", "fp16", "int8")
"""Codecs whose payloads have a length that is known, which chunks between workers need."""

AUTO = "auto"
"""In place of such a codec: one is chosen for each round, so that it keeps the budget."""


def plan_of(algorithm: Algorithm, workers: int | None) -> dict[str, Any]:
    """Return an algorithm's plan, with the reason for which exchanges and computing do not overlap.

    ``evaluation`` is true where the model is evaluated elsewhere than its gradients are computed.
    ``no_overlap`` is ``waits`` (for other workers) or ``sent`` (what a worker was sent last is
    compared with what it pushes), unless the algorithm's own plan has it. Workers that step by
    themselves between two exchanges are told by their routine.
    """
    plan = algorithm.plan(workers)
    if algorithm.rule().offset is not None:
        plan = {**plan, "evaluation": True}
    if plan.get("routine") in ("local", "elastic"):
        return plan
    if algorithm.policy(workers).awaits_workers:
        plan.setdefault("no_overlap", "waits")
    elif algorithm.rule().reads:
        plan.setdefault("no_overlap", "sent")
    return plan


class ClientPlan:
    """The plan of one server, made of its algorithm and options before any client joins.

    Attributes
    ----------
    fields
        The plan: plain values, sent to each client in its welcome.
    gate
        The workers' gate, as they make it of the plan; None: there is none.
    pushed, fetched
        The codecs of gradients, and of parameters.
    recall
        Bytes of gradients to keep, so that the gate can have them applied again.
    most_batches
        The mini-batches that a push may be made of: several only where a gate adds them up.

    Raises
    ------
    ConflictError
        When the algorithm and the options cannot work together.
    """

    def __init__(self, algorithm: Algorithm, options: Options) -> None:
        algorithm.check(options.workers, options.relaxed)
        check_shares(options.shards, options.budget, options.worker_budget)
        if options.relay and "average" not in algorithm.plan(options.workers):
            raise ConflictError(
                f"under {algorithm.name} workers have no connections to each other, so there is"
                " nothing to relay: drop --relay, or choose --policy average"
            )
        deadlines = {"patience": options.worker_deadline, "heartbeat": options.heartbeat}
        self.fields: dict[str, Any] = {**plan_of(algorithm, options.workers), **deadlines}
        if "average" in self.fields:
            rate = worker_rate(options.budget, options.worker_budget, options.workers)
            codec = AUTO if rate and not options.push_codec else _ring_codec(options.push_codec)
            among = {"budget": rate, "codec": codec, "tls": options.tls}
            self.fields["average"] = {**self.fields["average"], **among}
        self._watched = options.watched
        self.gate: Gate | None = None
        self.most_batches = 1
        gate, self.recall = self._chosen_gate(algorithm, options), 0
        if gate is not None:
            self.fields |= gate.plan(algorithm)
            self.gate = Gate.from_plan(self.fields["gate"])
            self.recall = options.recall if gate.skipped == "reapply" else 0
            self.most_batches = gate.longest + 1 if gate.skipped == "accumulate" else 1
        pushed = () if "average" in self.fields else options.push_codec
        self.pushed = CodecChoice.of(pushed)
        self.fetched = CodecChoice.of(options.fetch_codec)
        _check_sums(algorithm, self.pushed)
        if self.pushed:
            self.fields["push_codec"] = self.pushed.announced
        if self.fetched:
            self.fields["fetch_codec"] = self.fetched.announced

    @staticmethod
    def _chosen_gate(algorithm: Algorithm, options: Options) -> Gate | None:
        """Return the gate that was chosen, or that a budget needs."""
        gate = gates.find(options.gate) if options.gate else None
        if gate is not None:
            gate.check(algorithm, options.workers)
        elif options.budget or options.worker_budget:
            gate = gates.for_budget(algorithm, options.workers)
        return gate

    def codecs(self) -> set[str]:
        """Return the names of the codecs that gradients may be in."""
        return {codec.name for _pattern, codec in self.pushed.pairs}

    def for_worker(
        self, number: int, budget: GateController | None, workers: int
    ) -> dict[str, Any]:
        """Return the plan for a client that joins.

        Under a budget it has the seconds per byte; on a server that is watched, those between two
        messages that tell how long it has computed and waited. ``workers``: how many there are.
        """
        more: dict[str, Any] = {}
        if budget is not None:
            more["seconds_per_byte"] = budget.seconds_per_byte(workers)
        if self._watched:
            more["log_every"] = max(LOG_EVERY, workers / LOGS_PER_SECOND)
        return {**self.fields, **more, "worker": number}


def _ring_codec(specs: Sequence[str]) -> str:
    """Return the codec in which workers that average send each other chunks; empty: none."""
    if not specs or list(specs) == ["raw"]:
        return ""
    if len(specs) > 1 or specs[0] not in RING_CODECS:
        raise ConflictError(
            f"workers that average send chunks of the whole model in one of the codecs"
            f" {', '.join(RING_CODECS)}, not in {', '.join(specs)}: the others leave most of a"
            " chunk out, or differ by tensor"
        )
    return specs[0]


def _check_sums(algorithm: Algorithm, pushed: CodecChoice) -> None:
    """Refuse to save up gradients for a rule that would diverge on their squares."""
    saving = {codec.name for _pattern, codec in pushed.pairs if codec.accumulates}
    if saving and not algorithm.accepts_sums:
        name = algorithm.name
        raise ConflictError(
            f"{name} squares each gradient, and {min(saving)} leaves most of one out, to add it"
            f" to a later one: {name} diverges on what has been saved up so. Push with fp16,"
            " bf16 or int8, or choose another policy, such as fasgd"
        )
