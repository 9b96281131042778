"""The blocking model averager: train a model here, and average it with the other workers'."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from aiops.client.averager_facade import LEAVE_TIMEOUT, AveragerFacade
from aiops.client.averaging import AveragingLoop
from aiops.client.rounds import Averages
from aiops.common.closing import Closing
from aiops.common.tls_files import Tls
from aiops.errors import DeadlineExceeded, UsageError
from aiops.model.layout import Array
from aiops.wire.data_messages import GivenTask, TakeTask

__all__ = ["Averages", "ModelAverager"]


class ModelAverager(AveragerFacade, Closing):
    """One worker of an asynchronous model average.

    ::

        with aiops.client.ModelAverager("aiops://host:7171", params) as averager:
            for batch in data:
                with averager.step():
                    for name, gradient in gradients(params, batch).items():
                        params[name] -= averager.lr * gradient
            averager.average()                     # a last one, with those still there

    Training is not interrupted. Beside it, in a background thread, every ``interval`` seconds: the
    model is copied; the workers that are ready meet at the server (``--policy average``) and
    average their copies among themselves, each sending about twice the model's size; and the
    difference *mean − copy* is added to the model, which keeps what was learnt meanwhile. The lock
    that `step` holds is acquired only to copy and to add, never during a wait for another worker.

    * **Start.** The first worker's model is the initial one. Every later worker, at the start or in
      the midst of the run, begins with the current average: ``params`` are overwritten with it
      before the constructor returns.
    * **Failure.** A worker that dies or hangs in the midst of a round costs that round: the others
      give it up after ``stall`` seconds and meet again. (A worker that had the whole mean by then
      has taken it over; the others have not.) A straggler misses rounds; no training waits for it.
    * **Scope.** The parameters are averaged. The state of an optimizer (momentum) and a module's
      buffers (BatchNorm's statistics) stay each worker's own. float16 and bfloat16 are averaged,
      and travel, as float32.

    The server's policy sets the interval and the rest: ``aiops policies average`` lists them. An
    averager belongs to the process that made it: in a fork every call raises `UsageError`, and
    `close` does nothing.

    Parameters
    ----------
    url
        ``aiops://host[:port]``, or ``aiops+tls://``, of a server with ``--policy average``.
    params
        A mapping of writeable float64, float32, float16 or bfloat16 arrays of any shape by name,
        which are changed in place; or a ``torch.nn.Module``, on any device. All workers' must have
        the same names, shapes and dtypes.
    token, name, timeout, tls
        As `Client`'s. Of an ``aiops+tls://`` server the other workers are spoken to by TLS, too,
        for which each shows a certificate of the same CA. ``timeout`` (seconds, default 60) also
        bounds the constructor's wait for the others' model, and each wait for an average.
    host
        The address of this machine at which the other workers reach it; default: that of its
        connection to the server. The port is a free one.

    Attributes
    ----------
    lock
        The lock that `step` holds; hold it to read a model that no average changes meanwhile.
    stats
        The counts of the averages so far (`Averages`).
    steps, lr, plan, traffic
        The steps taken; the server's learning rate; the settings of its policy; bytes received from
        and sent to the server and the other workers.

    Raises
    ------
    UsageError
        When an argument is invalid, a tensor cannot be averaged, this machine cannot listen at
        ``host``, or the server's policy averages nothing.
    BadPush
        When the others' model has other tensors (the text names the first difference), or this one
        holds a value that is not finite.
    ConnectionLost, DeadlineExceeded, Unauthorised
        As `Client`; DeadlineExceeded also when the others do not share their model in time.
    """

    def __init__(
        self,
        url: str | None = None,
        params: Mapping[str, Array] | Any = None,
        *,
        token: str | None = None,
        name: str | None = None,
        timeout: float = 60.0,
        host: str | None = None,
        tls: Tls | None = None,
    ) -> None:
        super().__init__(url, params, token=token, name=name, timeout=timeout, host=host, tls=tls)
        self._ending: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._run, name="aiops-averager", daemon=True)
        self._thread.start()
        try:
            self._core.started.result()  # each wait before it has a deadline of its own
        except BaseException:
            self.close()
            raise

    # ------------------------------------------------------------ training

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Hold the lock for one step of training: the gradient and the update, or the update alone.

        If only the update is under the lock, an average may be added between the computation of a
        gradient and its update. That loses nothing; but PyTorch refuses a backward pass whose
        parameters changed since the forward pass, so with a module hold the lock for both.

        Each of the first ``warmup`` steps waits for an average at its end.

        Raises
        ------
        BadPush
            When the model holds a value that is not finite: training has diverged.
        UsageError
            When this averager is closed, or the step is within another.
        """
        self._check()
        if self.lock.mine:
            raise UsageError("a step cannot begin within another step")
        with self.lock:
            yield
            self._core.info.stepped()
        if self._core.started.result().stepped():
            self.average()

    # ------------------------------------------------------------ averaging

    def average(self) -> int:
        """Average now, also after `abort`, and wait for it.

        Returns
        -------
        The number of workers in it: 1 when no other worker was ready, 0 when it failed
        (``stats.last_error`` is the error; the model is as before).

        Raises
        ------
        UsageError
            When this averager is closed, or this thread holds the lock.
        DeadlineExceeded
            When it is not over in ``timeout`` seconds.
        """
        averaging, loop = self._outside("average")
        answer: concurrent.futures.Future[int] = concurrent.futures.Future()
        try:
            loop.call_soon_threadsafe(averaging.ask, answer)
        except RuntimeError:  # its loop ended just now
            self._check()
            raise
        count: int = self._wait(answer, "the average")
        return count

    def abort(self) -> None:
        """Stop averaging, as before an evaluation; return when no average is under way.

        After that no average changes the model until `resume`, and no other worker waits for this
        one.

        Raises
        ------
        UsageError
            As `average`.
        DeadlineExceeded
            When an average under way does not end in ``timeout`` seconds.
        """
        self._ask("abort", AveragingLoop.abort)

    def resume(self) -> None:
        """Average again after `abort`; raises as that does."""
        self._ask("resume", AveragingLoop.resume)

    # ------------------------------------------------------------ data sets

    def take_task(self, asked: TakeTask) -> GivenTask:
        """Ask for a task of a data set (`aiops.data` does).

        Raises
        ------
        BadPush, Refused
            When the data set is another one, or this worker may not have a task.
        """
        self._check()
        work = self._core.take_task(asked)
        found: GivenTask = self._scheduled(work).result()  # the request has a deadline
        return found

    def push_rest(self) -> None:
        """Average now, if this model has examples that no round had (`aiops.data` does)."""
        self._check()
        info = self._core.info
        with self.lock:
            info.stepped()
        if info.unsettled:
            self.average()

    def close(self) -> None:
        """Leave the server, so that no other worker waits for this one; may be called twice."""
        if self._closed:
            return
        self._closed = True
        core, task = self._core, self._core.task.result()  # which the thread makes at once
        loop = task.get_loop()

        def end() -> None:  # a coroutine made here could be left over: the loop may end first
            if not task.done():  # else it ends just now, and would not run a further task
                self._ending = loop.create_task(core.end(LEAVE_TIMEOUT))

        with contextlib.suppress(RuntimeError):  # its loop has ended
            loop.call_soon_threadsafe(end)
        self._thread.join()

    # ------------------------------------------------------------ inside

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(self._core.main())

    def _outside(self, what: str) -> tuple[AveragingLoop, asyncio.AbstractEventLoop]:
        """Return what averages; refuse a thread that holds the lock that an average needs."""
        self._check()
        if self.lock.mine:
            raise UsageError(f"{what}() waits for an average, which needs the lock: leave it first")
        return self._core.started.result(), self._core.task.result().get_loop()

    def _ask(
        self, what: str, function: Callable[[AveragingLoop], Coroutine[Any, Any, None]]
    ) -> None:
        averaging, _loop = self._outside(what)
        self._wait(self._scheduled(function(averaging)), "an average under way")

    def _scheduled(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Begin some work on the averager's event loop."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._core.task.result().get_loop())
        except BaseException:
            work.close()
            raise

    def _wait(self, answer: concurrent.futures.Future[Any], what: str) -> Any:
        try:
            return answer.result(self.timeout)
        except concurrent.futures.CancelledError:
            self._check()
            raise
        except TimeoutError as error:
            if isinstance(error, DeadlineExceeded):
                raise
            raise self._late(what) from None
