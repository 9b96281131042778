"""A Keras 3 optimizer whose steps are taken by the server, on Keras' PyTorch backend.

::

    os.environ["KERAS_BACKEND"] = "torch"
    import keras
    from aiops.client.keras import KerasOptimizer

    optimizer = KerasOptimizer()
    model.compile(optimizer, "sparse_categorical_crossentropy")   # was: "adam"
    model.fit(x, y)
    optimizer.close()

``compile`` wraps the optimizer where the precision is mixed_float16, and ``model.optimizer`` is
then a LossScaleOptimizer that cannot be closed: keep the optimizer itself.

With the backends of JAX and TensorFlow a training step is compiled whole, and there is no place in
it to talk to a server.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

try:
    import keras as _keras
except ImportError as missing:
    raise ImportError(
        "aiops.client.keras needs Keras 3 and PyTorch: pip install 'aiops-ps[frameworks]', and set"
        " KERAS_BACKEND=torch before keras is imported",
        name="keras",
    ) from missing

from aiops.client.torch import RemoteOptimizer
from aiops.errors import UsageError

__all__ = ["KerasOptimizer"]


class KerasOptimizer(_keras.optimizers.Optimizer):  # type: ignore[misc]
    """A `keras.optimizers.Optimizer` that pushes gradients and receives parameters.

    It joins the server when ``fit`` begins, so weights that are loaded before that define the
    model, if this is the first worker. Callbacks begin later: a checkpoint that one of them
    restores, as BackupAndRestore does, cannot define the model, and the first step refuses it.
    Variables are called ``0.kernel``, ``1.bias``, and so on.

    Parameters
    ----------
    url, overlap, token, timeout
        As `RemoteOptimizer`'s.
    learning_rate
        A number, a schedule or a function, as Keras takes them: the rate of a step. Default: the
        server's, which the attribute has from when ``fit`` begins (before: 1), unless another was
        set there.
    options
        ``clipnorm``, ``global_clipnorm``, ``clipvalue``, ``gradient_accumulation_steps``,
        ``loss_scale_factor`` and others of Keras' optimizers.

    Attributes
    ----------
    remote
        The `RemoteOptimizer` underneath; None before training.

    Raises
    ------
    UsageError
        When Keras has another backend than PyTorch, there is a ``weight_decay``, which is the
        server's, or ``use_ema``, or a variable has a constraint. At the first step: when a callback
        has changed the variables with which this worker has defined the model.
    """

    def __init__(
        self,
        url: str | None = None,
        learning_rate: Any = None,
        *,
        overlap: bool | int | None = None,
        token: str | None = None,
        timeout: float = 60.0,
        **options: Any,
    ) -> None:
        backend = _keras.backend.backend()
        if backend != "torch":
            raise UsageError(
                f"Keras' backend is {backend}, and a server's optimizer needs that of PyTorch: set"
                " KERAS_BACKEND=torch before keras is imported"
            )
        if options.get("weight_decay") is not None:
            raise UsageError(
                "weight_decay is the server's: start it with --set"
                f" weight_decay={options['weight_decay']}"
            )
        if options.get("use_ema"):
            raise UsageError(
                "use_ema overwrites variables with their averages, which the server undoes at the"
                " next step: leave it out, and let the server average (--policy schedule-free, its"
                " default, does)"
            )
        super().__init__(1.0 if learning_rate is None else learning_rate, **options)
        self._own_rate = learning_rate is not None
        self._usual = math.nan
        self.remote: RemoteOptimizer | None = None
        self._joins: dict[str, Any] = {
            "url": url,
            "overlap": overlap,
            "token": token,
            "timeout": timeout,
        }

    def build(self, variables: Sequence[Any]) -> None:
        """Join the server with a model's variables."""
        if self.built:
            return
        for variable in variables:
            if variable.constraint is not None:
                raise UsageError(
                    f"{variable.path!r} has a constraint, which the server cannot keep: leave it"
                    " out, or use weight decay (--set weight_decay=...)"
                )
        pairs = [(f"{at}.{each.name}", each.value) for at, each in enumerate(variables)]
        self.remote = RemoteOptimizer(pairs, **self._joins)
        self._usual = self.remote.param_groups[0]["lr"]  # of the tensors; `server_lr` may be none's
        if not self._own_rate:
            self.learning_rate = self._usual
        super().build(variables)

    @property
    def learning_rate(self) -> Any:
        """The rate of the next step; it may be set to another number."""
        return self._get_current_learning_rate()

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        self._own_rate = True
        _keras.optimizers.Optimizer.learning_rate.fset(self, rate)

    def _backend_update_step(
        self, grads: Sequence[Any], trainable_variables: Sequence[Any], learning_rate: Any
    ) -> None:
        """Push a step's gradients: what Keras calls once they are accumulated and clipped."""
        assert self.remote is not None
        self.remote.zero_grad()
        for gradient, variable in zip(grads, trainable_variables, strict=True):
            variable.value.grad = gradient
        if self.remote.last is None:
            self._check_untouched(self.remote)
        rate, usual = float(learning_rate), self._usual
        same = math.isclose(rate, usual, rel_tol=1e-6)  # Keras' is a float32
        self.remote.param_groups[0]["lr"] = usual if same else rate
        self.remote.step()

    def _check_untouched(self, remote: RemoteOptimizer) -> None:
        """Check, before the first step, that the model is the one that was defined here."""
        if remote.defined and remote.changed():
            raise UsageError(
                "the variables were changed after fit() had defined the server's model by them, as"
                " BackupAndRestore does, and a step would undo that: load the checkpoint before"
                " fit() (model.load_weights), and start a new server (this one has the model now)"
            )

    def log(self, **values: Any) -> None:
        """Log numbers about the training, as `Worker.log`; before ``fit`` begins nothing is."""
        if self.remote is not None:
            self.remote.log(**values)

    def close(self) -> None:
        """Push what has not been pushed yet, and leave the server, as `RemoteOptimizer.close`."""
        if self.remote is not None:
            self.remote.close()
