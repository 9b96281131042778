"""A PyTorch optimizer whose steps are taken by the server.

::

    from aiops.client.torch import RemoteOptimizer

    opt = RemoteOptimizer(model, "aiops://host:7171")   # was: torch.optim.SGD(model.parameters())
    for x, y in loader:
        loss = criterion(model(x), y)
        loss.backward()
        opt.step()                                      # push gradients, receive parameters
        opt.zero_grad()

Differences to a local optimizer:

* **Parameters** live on the server: the first worker's define the model, the others' are
  overwritten. Parameters that are frozen (``requires_grad=False``) when the optimizer is made stay
  local, so every worker must freeze the same ones.
* **Buffers** (the running statistics of BatchNorm) are not parameters: each worker keeps its own,
  from the mini-batches it has seen. To evaluate elsewhere, or with statistics that belong to the
  newest parameters, fetch and recompute them::

      fetch_into(model, url)
      torch.optim.swa_utils.update_bn(train_loader, model)
      model.eval()

* **Evaluation**: under some policies, ``schedule-free`` for one, gradients are computed elsewhere
  than where the model is best. `RemoteOptimizer.evaluation` has its parameters there for a block,
  and after `RemoteOptimizer.close` they are there.
* **Learning rates** are the server's, times a factor that each push brings: a group's ``lr``, and
  schedulers, work as they do locally (`RemoteOptimizer`).
* **Weight decay** of a group must be the server's for these tensors; the error names the flags
  with which it is, and `server_settings` returns those of a local optimizer. Under a policy that
  has none (``fasgd``, ``dcasgd``, ``easgd`` and a few more) it is added to the gradients here, as
  ``torch.optim.SGD`` does, and may change in training.
* **Processes** are not joined: a framework that starts ``torch.distributed`` where a launcher has
  set RANK and WORLD_SIZE is told by `standalone` that it is alone.
* **Embeddings** too large for a worker are layers of this module (`Embedding`), whose rows stay on
  the server.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NoReturn

try:
    import torch as _torch
except ImportError as missing:
    raise ImportError(
        "aiops.client.torch needs PyTorch, which is not here: pip install 'aiops-ps[torch]'",
        name="torch",
    ) from missing

from aiops.client import variables
from aiops.client.lr_factors import LrFactors
from aiops.client.params import Params
from aiops.client.remote import Remote
from aiops.client.request_kinds import Receipt
from aiops.client.server_info import ServerInfo
from aiops.client.sync.worker import Worker
from aiops.client.torch_arrays import finish_copies, lock_cuda_pages, to_array, to_tensor
from aiops.client.torch_embedding import Embedding, embeddings_in
from aiops.client.torch_params import TrainedTensor, fetch_into, sort_out
from aiops.client.torch_settings import ServerValues, server_settings
from aiops.errors import UsageError
from aiops.model.layout import Array
from aiops.wire.fields import MOST_FACTOR

__all__ = ["Embedding", "RemoteOptimizer", "fetch_into", "server_settings", "standalone"]

_log = logging.getLogger("aiops.client")


class RemoteOptimizer(Remote, _torch.optim.Optimizer):  # type: ignore[misc]
    """A `torch.optim.Optimizer` that pushes gradients to a server and receives parameters.

    The rule and its settings are the server's, and so is the learning rate: each group's ``lr``
    starts as the server's (`server_lr`). Where a group is given another, or a scheduler changes it,
    each push says what the server's rate is to be multiplied by, lr / `server_lr`, up to 100: the
    step is that of the other rate under every policy, and the server's own schedule goes on beside
    it. (The factor γ by which ``schedule-free`` raises the rate itself is measured at the server's
    rate. With ``--filter``, or trimmed means, the server refuses more than its own rate.)

    The `Embedding` layers of a module are trained too. Their rows are the last group: between
    ``backward()`` and `step` it has the rows that the mini-batch named, with their gradients, so
    that ``zero_grad`` and a GradScaler work on them. `step` pushes the rows before the rest; clear
    their gradients with the optimizer's ``zero_grad``, for the module's does not know them.

    It belongs to the process that made it. A DataLoader's processes, which are forks, may hold it,
    but `step` and `refresh` raise `UsageError` there, and `close` does nothing.

    Parameters
    ----------
    params
        A module; or (name, tensor) pairs; or tensors; or groups: dicts with such ``params`` and,
        optionally, an ``lr`` and a ``weight_decay``. Tensors without a name are called
        ``group0.param3``. They are dense leaves of any shape, float64, float32, float16 or
        bfloat16, on any device.
    embeddings
        `Embedding` layers by the names of their tables, where ``params`` is no module that has
        them. Default: none.
    url, overlap, token, name, timeout
        As `Worker`'s.

    Attributes
    ----------
    worker
        The `Worker` underneath: ``stats()``, ``traffic``, ``policy``.
    embeddings
        The `Embedding` layers that are trained, by the names of their tables.
    server_lr
        The learning rate that the server announced.
    version
        The model version of the parameters.
    defined
        The server's model was that of this module, and in its first version, when this was made.
    last
        The `Receipt` of the last step, or None.

    Raises
    ------
    UsageError
        When a parameter or a group's option cannot be trained remotely; the text names it.
    BadPush
        When the server's model has other tensors; the text names the first difference.
    ConnectionLost, DeadlineExceeded, RemoteProtocolError, Unauthorised
        As `Client`.
    """

    def __init__(
        self,
        params: _torch.nn.Module | Iterable[Any],
        url: str | None = None,
        *,
        embeddings: Mapping[str, Embedding] | None = None,
        overlap: bool | int | None = None,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
    ) -> None:
        self._made = self._warned = False
        self.last: Receipt | None = None
        self.embeddings: dict[str, Embedding] = embeddings_in(params, embeddings)
        _warn_of_a_group()
        groups, self._trained, self._frozen = sort_out(params, alone=not self.embeddings)
        self._leaves: list[Any] = []  # the rows that have a gradient now
        if self.embeddings:
            groups.append({"params": [], "param_names": [], "name": "embeddings"})
        super().__init__(groups, {"lr": None})
        if self.embeddings:
            self.param_groups[-1]["params"] = self._leaves
        arrays = {tensor.name: to_array(tensor.param.detach().cpu()) for tensor in self._trained}
        tables = {path: layer.table for path, layer in self.embeddings.items()} or None
        worker = _SuitedWorker(
            partial(_check_groups, self.param_groups, self._trained),
            *(url, arrays),
            tables=tables,
            overlap=overlap,
            token=token,
            name=name,
            timeout=timeout,
        )
        self._hold(worker)
        try:
            self.server_lr: float = self.worker.lr
            self._adopt()
            for path, layer in self.embeddings.items():
                layer.train_with(self.worker, path, self._leaves)
        except BaseException:
            self.abandon()
            raise
        self._made = True

    def _adopt(self) -> None:
        """Take over the server's learning rate and parameters."""
        self.defaults["lr"] = self.server_lr
        self._values = ServerValues(self.worker.policy, self.worker.settings)
        for number, group in enumerate(self.param_groups):
            lr, rates = _rates(number, group, self._trained, self._values, self.server_lr)
            group["lr"] = lr
            for tensor, rate in rates:
                tensor.rate = rate
        self._check_decays()
        for tensor in self._trained:
            tensor.server = to_tensor(self.worker.params[tensor.name])
        lock_cuda_pages(self.worker.params, self._by_name())
        self._overwritten = sum(
            not _torch.equal(tensor.param.detach().cpu(), tensor.server) for tensor in self._trained
        )
        if self._overwritten:
            _log.info(
                "%d of %d parameters here were overwritten by version %d of %s",
                *(self._overwritten, len(self._trained), self.version, self.worker.url),
            )
        self.defined: bool = not (self._overwritten or self.version)
        self._pull()

    def _check_decays(self) -> None:
        """Check the groups' weight decays, and note whether they are added to gradients here."""
        self._decays = [group.get("weight_decay") for group in self.param_groups]
        self._adds_decay = self._values.check_decays(_decays(self.param_groups, self._trained))

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
            When no parameter has a gradient, one is sparse, a group's ``lr`` is no rate that the
            server can have, its ``weight_decay`` is not the server's, or the policy needs a
            closure.
        BadPush
            When a value is not finite, or is 1e18 or more in magnitude; the text names the
            parameter, and nothing has changed.
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer.
        """
        if closure is None:
            if self.worker.plan.get("recompute"):
                raise UsageError(
                    f"{self.worker.policy} may ask for a gradient to be computed again: pass"
                    " step(closure) a closure that clears the gradients, computes the loss, calls"
                    " backward() and returns the loss"
                )
            self._take(self._gradients(), self._factors())
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
            gradients = self._gradients()
            self._push_rows()
            return gradients

        if self._trained:
            self.last = self.worker.step(compute, self._factors())
            self._pull()
        else:
            with _torch.enable_grad():
                loss = closure()
            self._take(self._gradients(), self._factors())
        return loss

    def _take(self, gradients: Mapping[str, Array], lr_factors: LrFactors) -> None:
        """Push rows, and then tensors if any has a gradient."""
        self._push_rows()
        if gradients:
            self.last = self.worker.step(gradients, lr_factors)
            self._pull()

    def _factors(self) -> LrFactors:
        """Return what the learning rates of a step are multiplied by; None: by 1."""
        groups = self.param_groups
        each = {t.name: _factor(t.group, groups[t.group], t.rate) for t in self._trained}
        return each if any(factor != 1 for factor in each.values()) else None

    def _push_rows(self) -> None:
        """Push the gradients of the embeddings' rows, and forget them."""
        if not self.embeddings:
            return
        factor = _factor(len(self.param_groups) - 1, self.param_groups[-1], self.server_lr)
        self._leaves.clear()
        for layer in self.embeddings.values():
            self.last = layer.push(self.worker, factor) or self.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the parameters, and of the embeddings' rows."""
        super().zero_grad(set_to_none)
        self._leaves.clear()
        for layer in self.embeddings.values():
            layer.discard()

    def refresh(self) -> int:
        """Overwrite the parameters as `Worker.refresh` does; return the model version.

        Raises
        ------
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer.
        """
        version = self.worker.refresh()
        self._pull()
        return version

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[int]:
        """Have the server's parameters in the module as they are where the model is evaluated.

        Under some policies, ``schedule-free`` for one, that is not where gradients are computed::

            with optimizer.evaluation():
                validate(model)

        It gives their version. After the block the module has the parameters to train again.
        Tensors that are no parameters, such as the means of a batch norm, stay as they are.

        Raises
        ------
        ConnectionLost, DeadlineExceeded
            When the server cannot be reached, or does not answer; nothing has changed.
        """
        found = self.worker.evaluation()
        try:
            self._copy(found, self._trained)
            yield found.version
        finally:
            self._pull()

    def _gradients(self) -> dict[str, Array]:
        """Return what to push: views of the gradients' memory where it can be pushed as it is.

        Gradients that the worker turns into directions stay on their devices.
        """
        self._check_unchanged()
        if self._decays != [group.get("weight_decay") for group in self.param_groups]:
            self._check_decays()
        found: dict[str, Any] = {}
        directed = self.worker.directed
        stay: dict[str, Any] = {}
        devices, room = set(), self._room()
        for tensor in self._trained:
            gradient = tensor.param.grad
            if gradient is None or not gradient.numel():
                continue
            if gradient.layout != _torch.strided:
                raise UsageError(
                    f"{tensor.name!r} has a sparse gradient, which cannot be pushed: make its layer"
                    " with sparse=False"
                )
            gradient = gradient.detach()
            if self._adds_decay and (decay := self._decays[tensor.group]):
                gradient = gradient.add(tensor.param.detach(), alpha=decay)
            if tensor.name in directed:
                stay[tensor.name] = gradient.to(tensor.server.dtype)
                continue
            found[tensor.name] = tensor.host(gradient, room)
            devices.add(gradient.device)
        if not (found or stay or self._leaves):
            raise UsageError("no parameter has a gradient: call loss.backward() before step()")
        finish_copies(devices)
        return {name: to_array(tensor) for name, tensor in found.items()} | stay

    def _room(self) -> Params | None:
        """Return room for gradients that are on CUDA devices, page-locked; None: none are."""
        if not any(tensor.param.is_cuda for tensor in self._trained):
            return None
        room = self.worker.room()
        lock_cuda_pages(room, self._by_name())
        return room

    def _by_name(self) -> dict[str, Any]:
        return {tensor.name: tensor.param for tensor in self._trained}

    def _check_unchanged(self) -> None:
        """Check that no frozen parameter is trained; warn of changes that will be overwritten."""
        for name, param in self._frozen:
            if param.requires_grad and param.grad is not None:
                raise UsageError(
                    f"{name!r} was frozen when this optimizer was made, so the server has no such"
                    " tensor: make it trainable first, and the optimizer after that"
                )
        changed = [] if self._warned else self.changed()
        if changed:
            self._warned = True
            _log.warning(
                "%r and %d other parameters were changed here since the last step; the server does"
                " not see that, and overwrites them (to start from a checkpoint, load it before the"
                " optimizer is made, or give it to the server with --init)",
                *(changed[0], len(changed) - 1),
            )

    def changed(self) -> list[str]:
        """Return the names of parameters that were changed here since they were overwritten."""
        return [tensor.name for tensor in self._trained if tensor.param._version != tensor.seen]

    def _show(self, params: Params) -> None:
        changed = set(self.changed())  # a checkpoint that was loaded at the end, say
        self._copy(params, [each for each in self._trained if each.name not in changed])

    def _copy(self, params: Params, tensors: Iterable[TrainedTensor]) -> None:
        """Overwrite some of the module's parameters with these."""
        with _torch.no_grad():
            for tensor in tensors:
                tensor.param.copy_(to_tensor(params[tensor.name]))

    def _pull(self) -> None:
        """Overwrite the module's parameters with the worker's."""
        with _torch.no_grad():
            for tensor in self._trained:
                tensor.param.copy_(tensor.server, non_blocking=tensor.param.is_cuda)
                tensor.seen = tensor.param._version
        # The worker's may change in the next step.
        finish_copies({tensor.param.device for tensor in self._trained})

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
        """Return the groups with their learning rates, and the model version they belong to.

        The parameters are the module's own ``state_dict``, and the optimizer's state (moments and
        so on) is the server's (``--save``).
        """
        leaves = self._leaves[:]
        self._leaves.clear()  # they are of one mini-batch, and no part of the state
        state: dict[str, Any] = super().state_dict()
        self._leaves.extend(leaves)
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
        mine, theirs = _names(self.param_groups), _names(state_dict["param_groups"])
        for own, other in zip_longest(mine, theirs):
            if own != other:
                raise UsageError(
                    f"this state is of other parameters: it has {other or 'nothing'} (group, name)"
                    f" where this optimizer has {own or 'nothing'}"
                )
        super().load_state_dict(state_dict)
        if self.embeddings:  # torch has made new groups
            self._leaves.clear()
            self.param_groups[-1]["params"] = self._leaves
            for layer in self.embeddings.values():
                layer.discard()
        if saved["version"] > self.version and (self._overwritten or self.changed()):
            _log.warning(
                "this state is of version %d, and the model of %s is at version %d: it is"
                " behind, or another one, and overwrites the parameters here. To go on from a"
                " checkpoint, load it into the module before the optimizer is made (the first"
                " worker's defines the model), or start the server with --state, or with"
                " --init and what it saved",
                *(saved["version"], self.worker.url, self.version),
            )
        elif saved["version"] != self.version:
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
            f"<RemoteOptimizer of {len(self._trained)} parameters at {worker.url}, {worker.policy},"
            f" version {self.version}>"
        )


def standalone() -> tuple[int, int]:
    """Hide the job from other frameworks, and the GPUs of other workers from this one.

    Of the environment's variables: those of the launcher leave it
    (`aiops.client.variables.standalone`), and, where several workers are on this machine, one of
    the GPUs stays in CUDA_VISIBLE_DEVICES. It is ``cuda:0`` from here on. Frameworks would
    otherwise take the first for each worker, or all. So call this before CUDA is used.

    Returns
    -------
    The worker's number, from 0, and how many there are.

    Raises
    ------
    UsageError
        When the worker's place is told in part only, or wrongly.
    """
    found = variables.standalone()
    if not _torch.cuda.is_initialized():
        variables.see_own_gpu(_torch.cuda.device_count())
    return found


def _warn_of_a_group() -> None:
    """Warn where workers may be joined in a process group, as frameworks do without being asked."""
    there = _torch.distributed
    if there.is_available() and there.is_initialized() and there.get_world_size() > 1:
        _log.warning(
            "torch.distributed joins this process and %d others. If the module is wrapped for it"
            " (DDP, FSDP), their gradients are averaged before each of them pushes the same: call"
            " aiops.client.torch.standalone() before the framework is set up",
            there.get_world_size() - 1,
        )


class _SuitedWorker(Worker):
    """A worker whose model is offered to a server only if that suits.

    Parameters
    ----------
    suits
        As `ServerInfo.suits`.
    given, named
        As `Worker`'s.
    """

    def __init__(self, suits: Callable[[ServerInfo], object], *given: Any, **named: Any) -> None:
        self._suits = suits
        super().__init__(*given, **named)


def _check_groups(
    groups: Sequence[Mapping[str, Any]], trained: Sequence[TrainedTensor], info: ServerInfo
) -> None:
    """Raise `UsageError` unless a server trains groups as they say, or workers can see to it."""
    values = ServerValues(info.policy, info.settings)
    for number, group in enumerate(groups):
        _rates(number, group, trained, values, info.lr)
    values.check_decays(_decays(groups, trained))


def _rates(
    number: int,
    group: Mapping[str, Any],
    trained: Iterable[TrainedTensor],
    values: ServerValues,
    server_lr: float,
) -> tuple[float, list[tuple[TrainedTensor, float]]]:
    """Return a group's learning rate, and the server's for each of its tensors.

    Where the group leaves it to the server, both are the server's.

    Raises
    ------
    UsageError
        When a push cannot bring the group's rate about.
    """
    mine = [tensor for tensor in trained if tensor.group == number]
    rates = [values.rate(tensor.name, server_lr) for tensor in mine]
    lr = group["lr"]
    if lr is None:
        lr = rates[0] if len(set(rates)) == 1 else server_lr
        rates = [lr] * len(mine)
    for rate in rates:
        _factor(number, {"lr": lr}, rate)
    return lr, list(zip(mine, rates, strict=True))


def _decays(
    groups: Sequence[Mapping[str, Any]], trained: Iterable[TrainedTensor]
) -> dict[str, float | None]:
    """Return the weight decay that each tensor's group has; None: it leaves it to the server."""
    return {tensor.name: groups[tensor.group].get("weight_decay") for tensor in trained}


def _factor(number: int, group: Mapping[str, Any], rate: float) -> float:
    """Return what the learning rate of a group's tensors is multiplied by.

    ``rate``: the server's for them.
    """
    lr = float(group["lr"])
    if not 0 <= lr < math.inf:
        raise UsageError(f"group {number}: lr must be 0 or more and finite, not {lr}")
    if lr == rate:
        return 1.0
    if not rate:
        raise UsageError(
            f"group {number}: lr is {lr:g}, but the server has 0 for a tensor of it, which keeps"
            " its values: set another rate there (--set lr=...@PATTERN)"
        )
    factor = lr / rate
    if factor > MOST_FACTOR:
        raise UsageError(
            f"group {number}: lr is {lr:g}, and the server has {rate:g}: a worker may multiply that"
            f" by {MOST_FACTOR:g} at most; set a larger rate on the server"
        )
    return 1.0 if math.isclose(factor, 1.0, rel_tol=1e-12) else factor


def _names(groups: Iterable[Mapping[str, Any]]) -> list[tuple[int, str]]:
    """Return the parameters' groups and names, in order."""
    return [(n, name) for n, group in enumerate(groups) for name in group["param_names"]]
