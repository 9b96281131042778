"""The trimmed mean of a step's gradients, in place of their mean."""

from __future__ import annotations

from dataclasses import dataclass

from aiops.algorithms.base import Algorithm
from aiops.errors import ConflictError
from aiops.kernels.trimmed_mean import MOST, NO_TRIM, Trim


@dataclass(frozen=True, kw_only=True)
class Trimmed(Algorithm):
    """Take a step with the mean of each coordinate without its largest and smallest values.

    .. math:: ḡ = (1/(c − 2k)) Σ g_(l),  k < l ≤ c − k,   k = min(⌈trim · c⌉, ⌊(c − 1)/2⌋)

    Here g₍₁₎ ≤ … ≤ g₍c₎ are the values of one coordinate in the c gradients of a step. While at
    most k of them are hostile, ḡ lies between values of honest ones, whatever the others are. It is
    a setting of the policy and no ``--filter``: those decide about a push alone, before the policy
    does, and this is how the step is made of the pushes that are used. Both may be on.

    Settings
    --------
    trim : float, default 0
        A step takes the trimmed mean of its c gradients: of the values of each coordinate,
        k = min(⌈trim · c⌉, ⌊(c − 1)/2⌋) are left out at each end (Yin et al. 2018); 0: none are;
        below 0.5. While at most k of the c are hostile, it lies between values of honest ones, but
        it is biased, the more so the less workers' data are alike. The server holds the c
        gradients, 64 at most. This is no ``--filter``: a filter decides about each push before the
        policy does, and this makes a step of those that are used. Numbers are in docs/filters.md.

    Source
    ------
    Yin, Chen, Ramchandran & Bartlett 2018, *Byzantine-robust distributed learning: towards optimal
    statistical rates*, definition 2.
    """

    trim: float = 0.0

    def __post_init__(self) -> None:
        """Check the settings."""
        super().__post_init__()
        self.require("trim", 0 <= self.trim < 0.5, "0 (none is left out) or more, below 0.5")

    def gathered(self, workers: int | None) -> int:
        """Return the number of gradients of a step."""
        raise NotImplementedError

    def trimming(self, workers: int | None) -> Trim:
        """Return the trimmed mean of these."""
        return Trim(self.trim, self.gathered(workers)) if self.trim else NO_TRIM

    def check(self, workers: int | None, relaxed: bool = False) -> None:
        """Refuse to hold too many gradients."""
        super().check(workers, relaxed)
        if self.trim and self.gathered(workers) > MOST:
            raise ConflictError(
                f"{self.name}: a trimmed mean is of at most {MOST} gradients, and a step here is of"
                f" {self.gathered(workers)}: leave out trim, or take fewer"
            )
