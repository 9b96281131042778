"""DiLoCo: synchronous, asynchronous, streaming."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiops.algorithms.base import Immediate, Policy
from aiops.algorithms.local_training import LocalTraining
from aiops.algorithms.policies import Barrier
from aiops.algorithms.server_optimizer import Optimised
from aiops.errors import ConflictError, UsageError
from aiops.kernels.rule import Rule
from aiops.kernels.vocabulary import Array, Scalar, where


def delayed_nesterov(
    w: Array,
    g: Array,
    m: Array,
    total: Array,
    step: Scalar,
    last: Scalar,
    share: Scalar,
    beta: Scalar,
) -> tuple[Array, ...]:
    """Apply one push of N (``share`` = 1/N); ``last`` is 1 for the N-th, which applies momentum."""
    total = total + share * g
    fresh = beta * m + total
    w = w - step * share * g
    moved = w - step * beta * fresh
    return (
        where(last > 0.5, moved, w),
        where(last > 0.5, fresh, m),
        where(last > 0.5, 0.0, total),
    )


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalTraining, Optimised):
    """DiLoCo: long local training, and an outer optimiser that steps by the workers' progress.

    .. math::

        worker:  x ← θ;  H steps of the inner optimiser;  push Δ = θ − x
        sync:    θ ← Outer(θ, (1/λ) Σ Δ_l)   after one push of every worker
        async:   θ ← θ − ε · Δ/N;   every N pushes  m ← β m + (1/N) Σ Δ,  θ ← θ − ε β m

    ``async`` is delayed Nesterov: every push is applied at once, and the momentum, which suffers
    from staleness, is applied only every N pushes. With ``fragments`` P > 1 it streams: a worker
    pushes one of P groups of tensors every H/P steps, and mixes what comes back into its own.

    Settings
    --------
    lr : float, default 0.7
        The outer learning rate, of the server's steps along the workers' changes. That of the
        workers' own steps is ``inner_lr``.
    optimizer, momentum : str, float; defaults ``nesterov``, 0.9
        The outer optimiser. ``async`` has a rule of its own, with ``lr`` as ε and momentum as β.
    mode : str, default ``sync``
        ``sync`` or ``async``.
    delay : int, default 4
        N of ``async``; usually the number of workers.
    fragments : int, default 1
        P; H must be a multiple of it.
    mix : float, default 0
        After a push x ← mix · x + (1 − mix) · θ; streaming DiLoCo has 0.5.
    overlap : bool, default False
        Go on training while a push is in flight; the steps taken meanwhile are kept.
    local_steps, inner, inner_lr : int, str, float; defaults 20, ``adamw``, 0.001
        H (the paper's 500 is for language models) and the inner optimiser: see below.

    Steps
    -----
    A step of a worker is an inner one, with one mini-batch of µ examples; every H steps their
    change is pushed. An update, and so a version, is of one push of each of the λ workers, and
    stands for λ·H·µ examples; in ``async`` of one push, for H·µ. With fragments a round of H steps
    has P updates, each of other tensors. By default ``schedule`` counts updates; ``inner_schedule``
    counts each worker's own steps. So ``lr`` is the outer learning rate, and not that of the usual
    training loop, which is ``inner_lr``.

    Source
    ------
    Douillard et al. 2023, *DiLoCo: distributed low-communication training of language models*; Liu
    et al. 2024, *Asynchronous local-SGD training for language modeling*, algorithm 3; Douillard et
    al. 2025, *Streaming DiLoCo with overlapping communication*.

    Note
    ----
    With H = 1, inner and outer plain SGD, outer rate 1, this averages the workers' models. With
    ``overlap`` the progress of a worker while its push was in flight is added to the reply (the
    paper overwrites it): x ← mix · x + (1 − mix) · (θ + progress).

    Example
    -------
    >>> DiLoCo(fragments=4).plan(workers=2)["push_every"]
    5
    """

    family = "local training"
    neighbours = "fedbuff easgd no-delay"
    name = "diloco"
    needs_workers = True
    lr: float = 0.7
    optimizer: str = "nesterov"
    local_steps: int = 20
    inner: str = "adamw"
    inner_lr: float = 0.001
    mode: str = "sync"
    delay: int = 4
    fragments: int = 1
    mix: float = 0.0
    overlap: bool = False

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        if self.mode not in ("sync", "async"):
            raise UsageError(f"diloco: mode must be 'sync' or 'async', not {self.mode!r}")
        self.require("delay", self.delay >= 1, "1 or more")
        self.require("fragments", self.fragments >= 1, "1 or more")
        self.require("mix", 0 <= self.mix < 1, "in [0, 1)")
        if self.local_steps % self.fragments:
            raise ConflictError(
                f"diloco: one of {self.fragments} fragments cannot be pushed every"
                f" {self.local_steps}/{self.fragments} steps: make local_steps a multiple"
            )
        if self.mode == "async":
            self._check_own_rule()

    def _check_own_rule(self) -> None:
        """Refuse settings of the outer optimiser that delayed Nesterov would ignore."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("optimizer", "weight_decay", "eps", "beta1", "beta2", "alpha"):
            if getattr(self, name) != defaults[name]:
                raise ConflictError(
                    f"diloco: async is delayed Nesterov, a rule of its own, and has no {name}:"
                    " leave it out, or use fedbuff"
                )

    @property
    def patterned(self) -> tuple[str, ...]:
        """All but the weight decay in ``async``, which has none."""
        found = super().patterned
        return found if self.mode == "sync" else tuple(n for n in found if n != "weight_decay")

    def tensor_scalars(self, tensor: str, shape: Sequence[int] = ()) -> tuple[float, ...]:
        """Return the optimiser's; delayed Nesterov has none."""
        return super().tensor_scalars(tensor) if self.mode == "sync" else ()

    def policy(self, workers: int | None) -> Policy:
        """Return a barrier, or for ``async`` the policy that applies every push at once."""
        return Barrier(fresh=False) if self.mode == "sync" else Immediate()

    @property
    def barrier(self) -> bool:
        """True if the mode is ``sync``."""
        return self.mode == "sync"

    def rule(self) -> Rule:
        """Return the outer optimiser, or delayed Nesterov."""
        if self.mode == "sync":
            return super().rule()
        constants = {"share": 1 / self.delay, "beta": self.momentum}
        return Rule(delayed_nesterov, {"m": 0.0, "total": 0.0}, constants, scalars=("last",))

    def scalars(self, update: int, staleness: float, gain: float) -> tuple[float, ...]:
        """Return the optimiser's scalars; for delayed Nesterov, 1 if this push is the N-th."""
        if self.mode == "sync":
            return super().scalars(update, staleness, gain)
        return (float(update % self.delay == 0),)

    def plan(self, workers: int | None) -> dict[str, Any]:
        """Add to the plan which fragment a push holds, and whether training goes on meanwhile."""
        return {
            **super().plan(workers),
            "push_every": self.local_steps // self.fragments,
            "overlap": "mix" if self.overlap else "none",
            "fragments": self.fragments,
            "in_step": self.mode == "sync",
            "mix": self.mix,
        }
