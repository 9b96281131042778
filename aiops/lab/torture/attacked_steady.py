"""Attack a server whose workers make steady exchanges, raw and coded."""

from __future__ import annotations

from typing import Any

from aiops.lab.torture.attacked import AttackedServer, Model

CODECS = "int8", "bf16", "fp16", "onebit"
"""Of pushes and answers: compiled code calls the loops of those that the server has chosen."""


class AttackedSteady(AttackedServer):
    """One server, whose model has tensors that may be coded and such that are too small.

    Its kernels are Numba's, if it is there, which compiled code calls by their addresses; with
    every second seed they are NumPy's. With half of the seeds workers fetch coded parameters, too.
    """

    model: Model = (
        ("a", "float32", (2, 300)),
        ("b", "float32", (5,)),
        ("none", "float32", (0, 2)),
        ("c", "float32", ()),
        ("d", "float32", (1100,)),
    )

    def settings(self) -> dict[str, Any]:
        """Return those of the server."""
        kernels = ("numpy", "auto")[self.plan.seed % 2]
        found = {**super().settings(), "kernels": kernels, "push_codec": [*CODECS]}
        if self.plan.seed // 2 % 2:
            found["fetch_codec"] = [CODECS[self.plan.seed // 4 % len(CODECS)]]
        if self.plan.policy == "asgd":  # which no gradient takes near to a limit, as others do
            found["set"] = {"lr": 1e-20}
        return found
