"""The parts that the blocking and the async faces share: identity, plan, byte counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from aiops import tracing
from aiops.bandwidth.byte_accounting import Ledger
from aiops.client import variables
from aiops.client.backoff import check_timeout
from aiops.client.calls import Calls
from aiops.client.params import Leased, Params
from aiops.client.request_kinds import Receipt, Request
from aiops.client.requests import Requests
from aiops.client.rows import FetchedRowsSink
from aiops.client.server_info import ServerInfo
from aiops.client.session import Session, checked_stream, stream
from aiops.client.traced_loop import StepTrace, TracedLoop
from aiops.client.traced_requests import RequestTracingLedger, TracedSession
from aiops.client.training_loop import TrainingLoop
from aiops.common import forks, urls
from aiops.common.launchers import detect
from aiops.common.tls_files import Tls
from aiops.errors import UsageError
from aiops.model.tables import Table
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.net.timed_socket import SocketTimes
from aiops.net.tls import TlsClient
from aiops.tracing import Tracing
from aiops.tracing.spans import LONGEST_NAME, brief


class SessionFacade:
    """The parts of a session that clients and workers show."""

    _session: Session

    @property
    def url(self) -> str:
        """The server's URL; of alternatives, that of all."""
        return self._session.url

    @property
    def policy(self) -> str:
        """The name of the server's algorithm."""
        return self._session.info.policy

    @property
    def settings(self) -> Mapping[str, Any]:
        """The settings of the server's algorithm, by name."""
        return self._session.info.settings

    @property
    def plan(self) -> Mapping[str, Any]:
        """The workers' part of the algorithm, as the server announced it."""
        return self._session.info.plan

    @property
    def token(self) -> str | None:
        """The token that it has for the server."""
        return self._session.identity.token

    @property
    def info(self) -> ServerInfo:
        """The knowledge of the server and its model."""
        return self._session.info

    @property
    def near(self) -> bool:
        """True if the server is on this machine, and memory is shared with it."""
        return self._session.wire.shared is not None

    @property
    def rolled_back(self) -> int:
        """Pushes that the server had acknowledged, and lost before it was started again.

        At most these, if the server has forgotten this client: it remembers 4,096 that have left.
        """
        return self._session.restarts.rolled_back

    @property
    def tables(self) -> Mapping[str, Table]:
        """The model's sparse parameters by name; none before the model is known."""
        return {named.name: named.table for named in self._session.info.rows.tables.each}

    @property
    def row_versions(self) -> Mapping[str, int]:
        """By table: the newest version of which this client has fetched rows."""
        return dict(self._session.info.rows.versions)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent so far, over all connections."""
        return self._session.traffic

    @property
    def ledger(self) -> Ledger:
        """The account of every byte so far, by tensor and reason, over all connections.

        A training loop that holds gradients or fetches back enters that here, with
        `Ledger.skipped_push` and `Ledger.skipped_fetch`.
        """
        return self._session.ledger

    def room(self) -> Params:
        """Return room for gradients: a `Params` of arrays, from which they travel with few copies.

        ::

            grads = worker.room()
            grads["w"][...] = ...
            worker.step(grads)

        A server on the same machine reads a model of more than 64 KiB there. Call it for each
        gradient: the arrays are the same each time, unless the server may still be reading them (a
        push was given up, or is under way).

        Raises
        ------
        UsageError
            When the model is not known yet.
        """
        return self._session.room()


class Facade(SessionFacade):
    """Base of `Client` and `AsyncClient`, which move the session's bytes."""

    def __init__(
        self,
        url: str | None,
        *,
        role: str,
        token: str | None,
        name: str | None,
        timeout: float,
        pongs: bool,
        tls: Tls | None,
        checksums: bool | None,
    ) -> None:
        url = variables.server_url(url)
        self._servers = urls.parse_all(url)
        if tls is not None and not urls.is_tls(url):
            raise UsageError(f"tls is for aiops+tls:// URLs, and this is {url!r}")
        self._tls = TlsClient(variables.tls_files(tls)) if urls.is_tls(url) else None
        check_timeout(timeout)
        self.timeout = timeout
        self._closed = self._forked = False
        self._env = env = CURRENT_ENVIRONMENT.get()
        client = env.token_bytes(16).hex()
        name = name or variables.client_name(role) or f"{role}-{env.identity()}"
        self._tracing = traced = _tracing_of(name, env.trace_clock) if role == "worker" else None
        session: Callable[..., Session] = Session
        if traced is not None:
            ledger = RequestTracingLedger(traced, client, _about(name))
            session = partial(TracedSession, traced=ledger)
        self._session = session(
            urls.write_all(self._servers),
            client=client,
            name=name,
            role=role,
            token=token or os.environ.get(variables.TOKEN) or None,  # as a server, which has none
            nonce=lambda: env.token_bytes(16),
            pongs=pongs,
            wire=checked_stream if variables.checksums(checksums) else stream,
            parallel_map=env.parallel_map,
        )
        self._requests = Requests(self._session)
        self._calls = Calls(self._session, self._requests)

    def note_log(self, values: Mapping[str, Any]) -> None:
        """Note numbers that are to be sent to the server, on any thread; raises as `Client.log`."""
        self._session.book.note(values)

    def forked(self) -> None:
        """Refuse to work in a fork; the connection is the parent's."""
        self._closed = self._forked = True
        self._session.ready = False
        if self._session.wire.shared is not None:
            self._session.wire.shared.lost()  # unmap the server's segments, except those in use

    def _unusable(self) -> UsageError:
        """Return the error of a call to a client that is closed."""
        return forks.inherited("client") if self._forked else UsageError("this client is closed")

    @property
    def patience(self) -> float:
        """Seconds that an answer may take.

        That is the time-out, the wait at the server's barrier, and under a bandwidth budget the
        time that a push and a fetch of the model may take.
        """
        return self._patience_for(None)

    def _patience_for(self, request: Request | None) -> float:
        plan = self._session.info.plan
        waits = request is None or request.waits
        allowed = self.timeout + (float(plan.get("patience", 0.0)) if waits else 0.0)
        slow = float(plan.get("seconds_per_byte", 0.0))
        if slow:
            layout = self._session.info.layout
            nbytes = layout.nbytes if layout is not None else 0
            if request is not None:  # the offer of a model that is not known yet, or rows
                nbytes += sum(len(view) for views in request.payloads for view in views)
                into = request.into
                nbytes += into.out.nbytes if isinstance(into, FetchedRowsSink) else 0
            allowed += slow * nbytes
        return allowed

    def begin(
        self,
        params: Params,
        clock: Callable[[], float],
        overlap: int = 0,
        tracing: Tracing | None = None,
    ) -> TrainingLoop:
        """Begin to train at these parameters by the server's plan; return the loop to drive.

        ``overlap``: how many exchanges may be under way while gradients are computed. ``tracing``:
        takes the spans of its pushes.

        Raises
        ------
        UsageError
            When they lie in the server's memory, and the plan has the worker write to them; or the
            plan does not permit ``overlap``.
        """
        session = self._session
        given = session.info, session.ledger, params, clock, overlap
        steps = TrainingLoop(*given) if tracing is None else self._traced_loop(tracing, *given)
        if isinstance(params, Leased) and steps.strategy.writes:
            params.release()
            if overlap:
                raise UsageError(
                    "with overlap a worker needs arrays of its own, since the next parameters come"
                    " while it computes at the last: leave out views=True, or overlap"
                )
            raise UsageError(
                f"under {self.policy} with these settings workers change their parameters"
                " themselves, so they need arrays of their own: leave out views=True"
            )
        return steps

    def _traced_loop(self, tracing: Tracing, *given: Any) -> TrainingLoop:
        """Return a loop whose pushes have spans."""
        session = self._session

        def last_push() -> int:  # numbers only rise, and rows beside the step have others
            steady, seq = session.steady, session.pending.model_seq
            return seq if steady is None else max(seq, steady.seq)

        client, about = session.identity.client, _about(session.identity.name)
        return TracedLoop(StepTrace(tracing, client, about, last_push, self._socket_times), *given)

    def _socket_times(self) -> SocketTimes | None:
        """Return when the only connection sent and received last, if it is known."""
        return None


def _tracing_of(name: str, now: Callable[[], int] | None) -> Tracing | None:
    """Return the tracing of a worker, if the environment asks for it."""
    about = {"service.instance.id": brief(name, LONGEST_NAME)}
    return tracing.start(os.environ.get(tracing.VARIABLE, ""), "worker", about, now)


def _about(name: str) -> dict[str, str | int]:
    """Return the attributes of a worker's spans."""
    about: dict[str, str | int] = {"aiops.worker": brief(name, LONGEST_NAME)}
    rank = detect(os.environ).rank
    return about if rank is None else {**about, "aiops.rank": rank}


def initial(params: Any, tables: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return a worker's initial parameters.

    Raises
    ------
    UsageError
        When there are none, or they have no names.
    """
    if params is None and tables:
        return {}
    if not isinstance(params, Mapping):
        given = "nothing" if params is None else type(params).__name__
        raise UsageError(
            f"params are arrays by name, as {{'w': array}}, not {given}: the first worker's define"
            " the model"
        )
    for name, array in params.items():
        if isinstance(array, Mapping):
            inner = next(iter(array), "b")
            raise UsageError(
                f"params[{name!r}] is a {type(array).__name__}, and params are arrays by name in"
                f" one flat dict, such as {{'{name}.{inner}': array}}; aiops.client.jax takes trees"
            )
    return params


class WorkerFacade(SessionFacade):
    """Base of `Worker` and `AsyncWorker`, which carry out the operations of its loop."""

    _client: Facade
    _begun: TrainingLoop | None = None  # once it is connected, and knows the parameters
    _tracing: Tracing | None = None
    _overlap = 0  # how many exchanges may be under way while gradients are computed
    _closed = _forked = False

    def forked(self) -> None:
        """Refuse to work in a fork, where the client closes its descriptors."""
        self._closed = self._forked = True

    @property
    def closed(self) -> bool:
        """True once it is closed, and in a fork."""
        return self._closed

    def _check(self) -> None:
        """Raise `UsageError` when this worker cannot be used any more."""
        if self._forked:
            raise forks.inherited("worker")
        if self._closed:
            raise UsageError("this worker is closed")

    def _begin_loop(self, params: Params, clock: Callable[[], float]) -> TrainingLoop:
        """Begin to train, and take over the client's traces, which end with this worker."""
        client = self._client
        loop = client.begin(params, clock, self._overlap, client._tracing)
        self._tracing, client._tracing = client._tracing, None
        return loop

    def room(self) -> Params:
        """Return room for gradients; with ``overlap`` of the worker's own, else as `Client.room`.

        With ``overlap`` the arrays are others for each step.
        """
        room = self._steps.strategy.room()
        return super().room() if room is None else room

    @property
    def _steps(self) -> TrainingLoop:
        if self._begun is None:
            raise UsageError(
                "this worker is not connected: use it as `async with AsyncWorker(...) as worker`,"
                " or await worker.connect()"
            )
        return self._begun

    @property
    def params(self) -> Params:
        """The parameters to compute the next gradients at: arrays by name.

        The arrays stay the same objects; with ``views`` there are other ones after each step.
        """
        return self._steps.params

    @property
    def directed(self) -> frozenset[str]:
        """The tensors of which directions are pushed in the place of gradients (schedule-free)."""
        return self._steps.directed

    @property
    def last(self) -> Receipt | None:
        """The receipt of the last push that was answered."""
        return self._steps.last

    @property
    def steps(self) -> int:
        """Mini-batches handed in."""
        return self._steps.steps

    @property
    def unpushed(self) -> int:
        """Steps that the policy has not pushed yet; leaving without a push loses them."""
        return self._steps.strategy.unpushed

    @property
    def recomputed(self) -> int:
        """Gradients that were computed again because the policy asked for it."""
        return self._steps.recomputed

    @property
    def compute_seconds(self) -> float:
        """Seconds spent outside `step`, and on local steps."""
        return self._steps.compute_seconds

    @property
    def idle_seconds(self) -> float:
        """Seconds spent waiting for the server."""
        return self._steps.idle_seconds

    @property
    def lr(self) -> float:
        """The learning rate of a gradient, as the server announced it (1 where there is none)."""
        return self._session.info.lr

    @property
    def version(self) -> int:
        """The model version of `params`."""
        return self.params.version
