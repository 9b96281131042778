"""A PyTorch optimizer whose steps are taken by the server.

::

    from aiops.client.torch import RemoteOptimizer

    opt = RemoteOptimizer(model, "aiops://host:7171")   # was: torch.optim.SGD(model.parameters())
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()                                      # push gradients, receive parameters
        opt.zero_grad()

What to know beyond that:

* **Parameters** live on the server: the first worker's define the model, the others' are
  overwritten. Parameters that are frozen (``requires_grad=False``) when the optimizer is made stay
  local, so every worker must freeze the same ones.
* **Buffers** (the running statistics of BatchNorm) are not parameters: each worker keeps its own,
  from the mini-batches it has seen. To evaluate elsewhere, or with statistics that belong to the
  newest parameters, fetch and recompute them::

      fetch_into(model, url)
      torch.optim.swa_utils.update_bn(train_loader, model)
      model.eval()

* **Learning rates**: see `RemoteOptimizer`.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import numpy as np

from aiops.client.blocking import Client
from aiops.client.conversation import Receipt
from aiops.client.params import Params
from aiops.client.worker import Worker
from aiops.errors import BadPush, UsageError, nearest
from aiops.layout import Array, dtype_named

try:
    import torch as _torch
except ImportError as missing:
    raise ImportError(
        "aiops.client.torch needs PyTorch, which is not installed here: pip install 'aiops-ps[torch]'",
        name="torch",
    ) from missing

__all__ = ["RemoteOptimizer", "fetch_into"]

_log = logging.getLogger("aiops.client")

_DTYPES = (_torch.float64, _torch.float32, _torch.float16, _torch.bfloat16)

_OPTIONS = {"params", "param_names", "lr", "initial_lr", "name"}
"""What a parameter group may say; everything else would be the server's to know."""

_PLAIN = {"asgd", "sasgd", "softsync", "hardsync"}
"""Policies whose step is linear in the gradient: scaling it scales the learning rate."""


@dataclass(slots=True, eq=False)
class _Slot:
    """One parameter: the module's tensor, the worker's copy, and where a gradient is staged."""

    name: str
    group: int
    param: Any
    server: Any = None  # shares the memory of the worker's arena
    staging: Any = None  # page-locked host memory, for a parameter on a CUDA device
    seen: int = 0  # the parameter's own version counter after it was last overwritten

    def host(self, gradient: Any) -> Any:
        """Return a gradient as a CPU tensor of the registered dtype: itself, where it can be.

        A copy from a CUDA device may still be under way; see `_finish_copies`.
        """
        gradient = gradient.to(self.server.dtype)
        if gradient.device.type != "cuda":
            return gradient.cpu()
        if self.staging is None:
            self.staging = _torch.empty(gradient.shape, dtype=gradient.dtype, pin_memory=True)
        return self.staging.copy_(gradient, non_blocking=True)


class RemoteOptimizer(_torch.optim.Optimizer):  # type: ignore[misc]
    """A `torch.optim.Optimizer` that pushes gradients to a server and receives parameters.

    The rule and its settings are the server's, and so is the learning rate: each group's ``lr``
    starts as the server's (`server_lr`). A group that is given another, or a scheduler that changes
    it, has its gradients multiplied by lr / `server_lr` before they are pushed. With ``asgd``,
    ``sasgd``, ``softsync`` and ``hardsync`` that is exactly the other learning rate. Policies that
    normalise gradients (``fasgd``) would undo it, so there `step` refuses such an ``lr``.

    Parameters
    ----------
    params
        A module; or (name, tensor) pairs; or tensors; or groups: dicts with such ``params`` and,
        if wanted, an ``lr``. Tensors without a name are called ``group0.param3``. float64, float32,
        float16 or bfloat16, on any device.
    url
        ``aiops://host:port``.
    token, name, timeout
        As `Client`'s.

    Attributes
    ----------
    worker
        The `Worker` underneath: ``stats()``, ``traffic``, ``policy``.
    server_lr
        The learning rate that the server announced.
    last
        The `Receipt` of the last step, or None.

    Raises
    ------
    UsageError
        When a parameter or a group's option cannot be trained remotely; the text names it.
    BadPush
        When the server's model has other tensors; the text names the first difference.
    ConnectionLost, DeadlineExceeded, Unauthorised
        As `Client`.
    """

    def __init__(
        self,
        params: _torch.nn.Module | Iterable[Any],
        url: str,
        *,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._made = False
        self.last: Receipt | None = None
        groups, self._slots, self._frozen = _sort(params)
        super().__init__(groups, {"lr": None})
        arrays = {slot.name: _array(slot.param.detach().cpu()) for slot in self._slots}
        self.worker = Worker(url, arrays, token=token, name=name, timeout=timeout)
        # Goodbye is said when this is collected or the program ends, so that nobody waits for it.
        self._finalizer = weakref.finalize(self, self.worker.close)
        try:
            self.server_lr = float(self.worker.stats()["settings"].get("lr", 1.0))
            self._adopt()
        except BaseException:
            self.close()
            raise
        self._made = True

    def _adopt(self) -> None:
        """Take over the server's learning rate and parameters."""
        self.defaults["lr"] = self.server_lr
        for number, group in enumerate(self.param_groups):
            if group["lr"] is None:
                group["lr"] = self.server_lr
            self._factor(number, group)
        for slot in self._slots:
            slot.server = _tensor(self.worker.params[slot.name])
        own = sum(not _torch.equal(slot.param.detach().cpu(), slot.server) for slot in self._slots)
        if own:
            _log.info(
                "%d of %d parameters here were overwritten by version %d of %s",
                *(own, len(self._slots), self.version, self.worker.url),
            )
        self._pull()

    # ------------------------------------------------------------ training

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Push the gradients in ``.grad``, and overwrite the parameters with the server's.

        A parameter whose ``.grad`` is None takes no part in this step.

        Parameters
        ----------
        closure
            Clears the gradients, computes the loss, calls ``backward()`` and returns the loss. The
            server may refuse a stale gradient and want it recomputed (``hardsync`` with
            ``admission=reject``): it is then called again, on newer parameters.

        Returns
        -------
        The last loss that the closure returned, or None without one.

        Raises
        ------
        UsageError
            When no parameter has a gradient, one is sparse, a group's ``lr`` cannot be had from
            this server, or the policy needs a closure.
        BadPush
            When a gradient is not finite; the text names the parameter, and nothing has changed.
        """
        if closure is None:
            if self.worker.plan.get("recompute"):
                raise UsageError(
                    f"{self.worker.policy} may ask for a gradient to be computed again: pass"
                    " step(closure) a closure that clears the gradients, computes the loss, calls"
                    " backward() and returns the loss"
                )
            self.last = self.worker.step(self._gradients())
            self._pull()
            return None

        loss: Any = None
        again = False

        def compute(params: Params) -> Mapping[str, Array]:
            nonlocal loss, again
            if again:  # the server refused the gradient, and sent newer parameters
                self._pull()
            again = True
            with _torch.enable_grad():
                loss = closure()
            return self._gradients()

        self.last = self.worker.step(compute)
        self._pull()
        return loss

    def refresh(self) -> int:
        """Overwrite the parameters with the server's newest, without a push; return the version."""
        version = self.worker.refresh()
        self._pull()
        return version

    @property
    def version(self) -> int:
        """The model version of the parameters."""
        return self.worker.version

    def close(self) -> None:
        """Say goodbye, so that nobody waits for this worker; may be called twice."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _gradients(self) -> dict[str, Array]:
        """Return what to push: views of the gradients' memory where it can be pushed as it is."""
        factors = [self._factor(number, group) for number, group in enumerate(self.param_groups)]
        self._check_unchanged()
        found: dict[str, Any] = {}
        devices = set()
        for slot in self._slots:
            gradient = slot.param.grad
            if gradient is None or not gradient.numel():
                continue
            if gradient.layout != _torch.strided:
                raise UsageError(
                    f"{slot.name!r} has a sparse gradient, which cannot be pushed: make its layer"
                    " with sparse=False"
                )
            gradient = gradient.detach()
            if factors[slot.group] != 1.0:
                gradient = gradient * factors[slot.group]
            found[slot.name] = slot.host(gradient)
            devices.add(gradient.device)
        if not found:
            raise UsageError("no parameter has a gradient: call loss.backward() before step()")
        _finish_copies(devices)
        return {name: _array(tensor) for name, tensor in found.items()}

    def _factor(self, number: int, group: Mapping[str, Any]) -> float:
        """Return what a group's gradients are multiplied by for its learning rate."""
        lr = float(group["lr"])
        factor = lr / self.server_lr
        if not 0 <= factor < math.inf:
            raise UsageError(f"group {number}: lr must be 0 or more and finite, not {lr}")
        if self.worker.policy in _PLAIN:
            return factor
        if not math.isclose(factor, 1.0, rel_tol=1e-6):
            raise UsageError(
                f"group {number}: lr is {lr:g}, but the server trains with {self.server_lr:g}, and"
                f" {self.worker.policy} normalises gradients, so a worker cannot change it by"
                f" scaling them: set the rate on the server (--lr {lr:g}), or use one of the"
                f" policies {', '.join(sorted(_PLAIN))}"
            )
        return 1.0

    def _check_unchanged(self) -> None:
        """See that nobody trains what the server does not know, or overlooks that it decides."""
        for name, param in self._frozen:
            if param.grad is not None:
                raise UsageError(
                    f"{name!r} was frozen when this optimizer was made, so the server has no such"
                    " tensor: make it trainable first, and the optimizer after that"
                )
        changed = [slot.name for slot in self._slots if slot.param._version != slot.seen]
        if changed:
            _log.warning(
                "%r and %d other parameters were changed here since the last step; the server does"
                " not see that, and overwrites them (to start from a checkpoint, load it before the"
                " optimizer is made, or give it to the server with --init)",
                *(changed[0], len(changed) - 1),
            )

    def _pull(self) -> None:
        """Overwrite the module's parameters with the worker's."""
        with _torch.no_grad():
            for slot in self._slots:
                slot.param.copy_(slot.server)
                slot.seen = slot.param._version

    # ------------------------------------------------------------ the rest of an Optimizer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: the model is defined on the server when the optimizer is made."""
        if self._made:
            raise UsageError(
                "a parameter group cannot be added: the model was defined on the server when this"
                " optimizer was made; give it all parameters then"
            )
        super().add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups with their learning rates, and which model version they belong to.

        The parameters are the module's own ``state_dict``, and the optimizer's state (moments and
        so on) is the server's (``--save``).
        """
        state: dict[str, Any] = super().state_dict()
        state["aiops"] = {
            "policy": self.worker.policy,
            "server_lr": self.server_lr,
            "version": self.version,
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the groups' learning rates; nothing changes on the server.

        Raises
        ------
        UsageError
            When the state is another optimizer's, or of other parameters.
        """
        saved = state_dict.get("aiops")
        if saved is None:
            raise UsageError(
                "this is the state of another optimizer: the server keeps the optimizer's state"
                " here, so there is nothing to load it into"
            )
        mine, theirs = (
            [group["param_names"] for group in groups]
            for groups in (self.param_groups, state_dict["param_groups"])
        )
        if mine != theirs:
            raise UsageError(f"this state is of other parameters: {theirs}, not {mine}")
        super().load_state_dict(state_dict)
        if saved["version"] != self.version:
            _log.info(
                "learning rates of version %d were loaded; the parameters stay those of version %d"
                " of %s",
                *(saved["version"], self.version, self.worker.url),
            )

    def __getstate__(self) -> NoReturn:
        """Refuse to be pickled or copied."""
        raise UsageError(
            "a RemoteOptimizer holds a connection and cannot be pickled or copied: make one in each"
            " process"
        )

    def __repr__(self) -> str:
        worker = self.worker
        return (
            f"<RemoteOptimizer of {len(self._slots)} parameters at {worker.url}, {worker.policy},"
            f" version {self.version}>"
        )


def fetch_into(
    params: _torch.nn.Module | Iterable[Any],
    url: str,
    *,
    token: str | None = None,
    timeout: float = 60.0,
) -> int:
    """Overwrite parameters with the server's newest as an observer, to evaluate or to export them.

    Parameters
    ----------
    params
        As `RemoteOptimizer`'s; frozen or not. What the server does not have stays as it is.
    url, token, timeout
        As `Client`'s.

    Returns
    -------
    The model version.

    Raises
    ------
    NotReady
        When nobody has defined the model yet.
    BadPush
        When a tensor of the server's is missing here or has another shape; nothing has changed.
    """
    mine = {name: tensor for _, pairs in _groups(params) for name, tensor in pairs}
    with Client(url, token=token, timeout=timeout) as client:
        theirs = client.fetch()
    for name, array in theirs.items():
        if name not in mine:
            raise BadPush(f"{url} has a tensor {name!r} that is none here; {nearest(name, mine)}")
        if tuple(mine[name].shape) != array.shape:
            raise BadPush(
                f"{name!r} has shape {array.shape} at {url}, but {tuple(mine[name].shape)} here"
            )
    with _torch.no_grad():
        for name, array in theirs.items():
            mine[name].copy_(_tensor(array))
    return theirs.version


# ---------------------------------------------------------------- parameters and their names

_Pairs = list[tuple[str, Any]]


def _groups(params: Any) -> list[tuple[dict[str, Any], _Pairs]]:
    """Return, per parameter group, its options and its (name, tensor) pairs."""
    if isinstance(params, _torch.nn.Module):
        params = params.named_parameters()  # which names a tied weight once
    if isinstance(params, _torch.Tensor):
        raise UsageError("give the optimizer a module or a list of parameters, not one tensor")
    items = list(params)
    if not items or not isinstance(items[0], Mapping):
        items = [{"params": items}]
    found = []
    for number, item in enumerate(items):
        strange = sorted(item.keys() - _OPTIONS)
        if strange:
            raise UsageError(
                f"group {number} sets {strange[0]!r}, but the rule and its settings are the"
                " server's: set it there; a group here has 'params' and 'lr'"
            )
        members = item["params"]
        if isinstance(members, set | frozenset):
            raise UsageError(f"group {number} is a set, whose order is random: give a list")
        members = [members] if isinstance(members, _torch.Tensor) else list(members)
        pairs = [
            member if isinstance(member, tuple) else (f"group{number}.param{index}", member)
            for index, member in enumerate(members)
        ]
        options = {key: item[key] for key in item if key not in ("params", "param_names")}
        # torch.compile wraps a module and renames its parameters; the other workers may not.
        found.append((options, [(name.replace("_orig_mod.", ""), p) for name, p in pairs]))
    return found


def _sort(params: Any) -> tuple[list[dict[str, Any]], list[_Slot], _Pairs]:
    """Return the groups for `torch.optim.Optimizer`, what is trained, and what is frozen."""
    groups: list[dict[str, Any]] = []
    slots: list[_Slot] = []
    frozen: _Pairs = []
    names: dict[int, str] = {}
    taken: set[str] = set()
    for number, (options, pairs) in enumerate(_groups(params)):
        trained: _Pairs = []
        for name, param in pairs:
            if not isinstance(param, _torch.Tensor):
                raise UsageError(f"{name!r} is a {type(param).__name__}, not a tensor")
            if id(param) in names:
                raise UsageError(
                    f"{name!r} is the same tensor as {names[id(param)]!r}: give each one once, as"
                    " module.named_parameters() does"
                )
            if name in taken:
                raise UsageError(f"two parameters are called {name!r}: give them different names")
            names[id(param)] = name
            taken.add(name)
            if param.requires_grad:
                _check(name, param)
                trained.append((name, param))
            else:
                frozen.append((name, param))
        slots.extend(_Slot(name, number, param) for name, param in trained)
        members = {"params": [p for _, p in trained], "param_names": [n for n, _ in trained]}
        groups.append({**options, **members})
    if not slots:
        raise UsageError("there is nothing to train: no parameter has requires_grad=True")
    return groups, slots, frozen


def _check(name: str, param: Any) -> None:
    """Refuse a parameter that cannot be trained remotely."""
    if _torch.nn.parameter.is_lazy(param):
        raise UsageError(
            f"{name!r} has no shape yet: run the lazy module once before the optimizer is made"
        )
    if param.dtype not in _DTYPES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise UsageError(f"{name!r} is {param.dtype}, which cannot be trained remotely; {known} can")
    if param.layout != _torch.strided or param.is_meta:
        raise UsageError(f"{name!r} is sparse or has no memory: only dense tensors can be trained")
    if not param.is_leaf:
        raise UsageError(f"{name!r} was computed from other tensors: give those to the optimizer")


# ---------------------------------------------------------------- tensors and arrays


def _array(tensor: Any) -> Array:
    """Return a CPU tensor as an array over the same memory."""
    if tensor.dtype == _torch.bfloat16:  # which NumPy does not know
        return np.asarray(tensor.view(_torch.int16).numpy()).view(dtype_named("bfloat16"))
    array: Array = tensor.numpy()
    return array


def _tensor(array: Array) -> Any:
    """Return an array as a CPU tensor over the same memory."""
    if array.dtype.name == "bfloat16":
        return _torch.from_numpy(array.view(np.int16)).view(_torch.bfloat16)
    return _torch.from_numpy(array)


def _finish_copies(devices: Iterable[Any]) -> None:
    """Wait until gradients that are on their way from CUDA devices are here."""
    for device in devices:
        if device.type == "cuda":
            _torch.cuda.current_stream(device).synchronize()
