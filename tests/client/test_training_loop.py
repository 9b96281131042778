"""A worker's scripts, driven by hand: no socket, no thread, no clock but a number."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.bandwidth.byte_accounting import Ledger
from aiops.client.params import Params
from aiops.client.program import drive
from aiops.client.request_kinds import Receipt
from aiops.client.strategies import Transfer
from aiops.client.training_loop import (
    JoinBackground,
    Offer,
    Op,
    Send,
    SendInBackground,
    TrainingLoop,
)
from aiops.errors import (
    BadPush,
    ConnectionLost,
    NotReady,
    Restarted,
    StaleGradient,
    UsageError,
)
from aiops.model.layout import Array, Layout
from tests.rows import each_row
from tests.strategies import DETERMINISTIC

START: dict[str, Array] = {"w": np.zeros(4, np.float32), "b": np.zeros(2, np.float64)}
ONES: dict[str, Array] = {"w": np.ones(4, np.float32), "b": np.ones(2)}
SGD = {"optimizer": "sgd", "lr": 1.0}

DIRECT: Mapping[str, Any] = {"recompute": True}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "accumulate": {"routine": "accumulate", "push_every": 2, "fetch_every": 4, "inner": SGD},
    "local": {"routine": "local", "push_every": 2, "inner": SGD},
    "local-free": {
        "routine": "local", "push_every": 1, "overlap": "free", "limit": 3, "inner": SGD,
    },
    "local-cycles": {"routine": "local", "push_every": 2, "overlap": "cycle", "inner": SGD},
    "gated": {
        "routine": "gated", "worker": 0,
        "gate": {"kind": "constant", "p_push": 0.5, "p_fetch": 0.5, "combine": "sum"},
    },
}  # fmt: skip
"""Plans whose workers keep their steps until they have arrived; the server adds up what comes."""


class BackgroundTransfer:
    """A transfer in the background, of which the test says when it is over."""

    def __init__(self, transfer: Transfer) -> None:
        self.transfer = transfer
        self.over = False
        self.receipt: Receipt | None = None
        self.error: BaseException | None = None


class Server:
    """What stands for a server: it adds up what is pushed, each transfer once."""

    def __init__(
        self, plan: Mapping[str, Any], overlap: int = 0, start: Mapping[str, Array] = START
    ) -> None:
        self.model = {name: array.copy() for name, array in start.items()}
        self.version = 0
        self.answered: dict[int, tuple[Transfer, Receipt | None]] = {}
        self.now = 0.0
        layout = Layout.of(start)
        info: Any = SimpleNamespace(
            plan=plan, policy="some-policy", url="aiops://s", connection=("me", 1), examples=[]
        )
        info.take_examples = tuple
        self.info = info
        params = Params(layout)
        self._tell(params)
        ledger = Ledger(layout, own=True)
        self.steps = TrainingLoop(info, ledger, params, lambda: self.now, overlap)

    def carry(self, transfer: Transfer) -> Receipt | None:
        """Apply it, unless that has been done, and answer."""
        receipt: Receipt | None = None
        if id(transfer) in self.answered:
            receipt = self.answered[id(transfer)][1]
        elif transfer.arrays is not None:
            self.version += 1
            for name, array in transfer.arrays.items():
                self.model[name] -= array
            receipt = Receipt(self.version, 0, 0.0, None, {})
        self.answered[id(transfer)] = transfer, receipt
        if transfer.into is not None:
            self._tell(transfer.into)
        return receipt

    def _tell(self, params: Params) -> None:
        for name, array in self.model.items():
            params[name][...] = array
        params.version = self.version
        params.held[:] = params.versions[:] = self.version

    def see_to(self, background: BackgroundTransfer) -> None:
        if not background.over:
            background.receipt, background.over = self.carry(background.transfer), True


class TestDirections:
    """A gradient counts in the momentum once, when its step is taken."""

    START: Mapping[str, Array] = {"w": np.zeros((8, 8), np.float32)}

    def server(self, plan: Mapping[str, Any], overlap: int = 0) -> Server:
        return Server({**plan, "orthogonal": 0.5}, overlap, self.START)

    @staticmethod
    def gradient(seed: int) -> dict[str, Array]:
        return {"w": np.random.default_rng(seed).normal(size=(8, 8)).astype(np.float32)}

    @staticmethod
    def momentum(server: Server) -> Array:
        assert server.steps._directions is not None
        return server.steps._directions.arrays()["w"].copy()

    @pytest.mark.parametrize("known", [True, False])
    def test_a_step_that_raises_the_error_of_another(self, known: bool) -> None:
        server, under_way = self.server({}, overlap=1), list[BackgroundTransfer]()

        def fail() -> None:
            under_way[-1].over, under_way[-1].error = True, BadPush("no")

        def carry_out(order: Op) -> Any:
            if isinstance(order, SendInBackground):
                under_way.append(BackgroundTransfer(order.transfer))
                return under_way[-1]
            assert isinstance(order, JoinBackground)
            return fail()

        def step(seed: int) -> None:
            given = server.steps.directions(self.gradient(seed), lambda: None)
            drive(server.steps.step(given, again=False), carry_out)

        step(1)
        before = self.momentum(server)
        np.testing.assert_array_equal(before, 0.5 * self.gradient(1)["w"])
        if known:
            fail()
        with pytest.raises(BadPush, match="step 1, whose push was in the background"):
            step(2)
        np.testing.assert_array_equal(self.momentum(server), before)
        step(2)
        wanted = 0.5 * before + 0.5 * self.gradient(2)["w"]
        np.testing.assert_array_equal(self.momentum(server), wanted)

    @pytest.mark.parametrize("program", [False, True])
    def test_a_stale_gradient_that_is_computed_again(self, program: bool) -> None:
        server = self.server({"recompute": True})
        stale = StaleGradient("too old")

        def refuse(order: Op) -> Any:
            raise stale

        given = server.steps.directions(self.gradient(1), lambda: None)
        if program:
            script = server.steps.step(given, again=True)
        else:
            server.steps.begin(again=True)
            script = server.steps.failed(stale, again=True)
        assert drive(script, refuse) is None
        assert not self.momentum(server).any()
        given = server.steps.directions(self.gradient(2), lambda: None)
        if program:
            assert drive(
                server.steps.step(given, again=True), lambda order: server.carry(order.transfer)
            )  # type: ignore[union-attr]
        else:
            server.steps.took(Receipt(1, 0, 0.0, None, {}))
        np.testing.assert_array_equal(self.momentum(server), 0.5 * self.gradient(2)["w"])

    def test_a_gradient_that_could_not_be_computed_again(self) -> None:
        server = self.server({"recompute": True})
        server.steps.directions(self.gradient(1), lambda: None)
        with pytest.raises(UsageError):
            server.steps.begin(again=False)
        server.steps.directions(self.gradient(2), lambda: None)
        server.steps.took(Receipt(1, 0, 0.0, None, {}))
        np.testing.assert_array_equal(self.momentum(server), 0.5 * self.gradient(2)["w"])

    def test_the_workers_own_step_counts_although_its_push_fails(self) -> None:
        server = self.server({"routine": "local", "push_every": 1, "inner": SGD})

        def lose(order: Op) -> Any:
            raise ConnectionLost("gone")

        given = server.steps.directions(self.gradient(1), lambda: None)
        with pytest.raises(ConnectionLost):
            drive(server.steps.step(given, again=False), lose)
        assert server.steps.params["w"].any()
        np.testing.assert_array_equal(self.momentum(server), 0.5 * self.gradient(1)["w"])

    @pytest.mark.parametrize("local", [False, True])
    def test_a_restarted_server_with_another_memory(self, local: bool) -> None:
        """A worker's own steps stay as they began: their rates go with their directions."""
        own = {"routine": "local", "push_every": 1, "inner": SGD} if local else {}
        server = self.server(own)
        before = server.steps.directed
        server.steps._info.plan.pop("orthogonal")  # type: ignore[attr-defined]
        answers = iter([Restarted("the server was restarted"), None])

        def carry_out(order: Any) -> Any:
            answer = next(answers, None)
            if answer is not None:
                raise answer
            return server.carry(order.transfer)

        drive(server.steps.step(self.gradient(1), again=False), carry_out)
        assert before == {"w"}
        assert server.steps.directed == (before if local else frozenset())


class TestOrders:
    """Which orders are given, and what becomes of a step."""

    def drive(
        self, server: Server, *answers: Any, again: bool = True
    ) -> tuple[Receipt | None, list[Op]]:
        """Take a step, answering each order in turn; a callable carries the order out."""
        orders: list[Op] = []
        queue = list(answers)

        def carry_out(order: Op) -> Any:
            orders.append(order)
            server.now += 1
            answer = queue.pop(0)
            if isinstance(answer, BaseException):
                raise answer
            return answer(order) if callable(answer) else answer

        receipt = drive(server.steps.step(ONES, again=again), carry_out)
        assert not queue
        return receipt, orders

    def test_a_gradient_travels_and_is_answered(self) -> None:
        server = Server(DIRECT)
        receipt, [order] = self.drive(server, lambda order: server.carry(order.transfer))
        assert isinstance(order, Send)
        assert order.transfer.arrays is ONES
        assert receipt is server.steps.last
        assert server.steps.steps == server.steps.params.version == 1
        assert (server.steps.idle_seconds, server.steps.compute_seconds) == (1, 0)

    def test_time_between_the_steps_is_computing(self) -> None:
        server = Server(DIRECT)
        server.now = 5
        self.drive(server, lambda order: server.carry(order.transfer))
        server.now = 8
        self.drive(server, lambda order: server.carry(order.transfer))
        assert (server.steps.idle_seconds, server.steps.compute_seconds) == (2, 5 + 2)

    def test_a_stale_gradient_is_computed_again(self) -> None:
        server = Server(DIRECT)
        receipt, _orders = self.drive(server, StaleGradient("too old"))
        assert receipt is None
        assert (server.steps.steps, server.steps.recomputed) == (0, 1)
        receipt, _orders = self.drive(server, lambda order: server.carry(order.transfer))
        assert receipt is not None
        with pytest.raises(StaleGradient):
            self.drive(server, StaleGradient("too old"), again=False)
        assert (server.steps.steps, server.steps.recomputed) == (1, 1)

    def test_arrays_are_refused_where_a_gradient_may_be_wanted_again(self) -> None:
        steps = Server(DIRECT).steps
        steps.check(again=True)
        with pytest.raises(UsageError, match=r"some-policy may .* call step\(function\)"):
            steps.check(again=False)

    @pytest.mark.parametrize("again", [False, True])
    def test_a_restarted_server_is_gone_on_with(self, again: bool) -> None:
        server = Server(DIRECT)
        fetch: Any = lambda order: server.carry(order.transfer)  # noqa: E731
        server.version = 7
        receipt, orders = self.drive(
            server, Restarted("the server was restarted"), fetch, again=again
        )
        assert [type(order) for order in orders] == [Send, Send]
        assert server.steps.params.version == 7
        assert (receipt is None) == again, "the gradient belonged to other parameters"
        assert receipt is None or not receipt.used

    @pytest.mark.parametrize("taken", [False, True])
    def test_a_server_without_its_model_is_offered_ours(self, taken: bool) -> None:
        server = Server(PLANS["local"])
        fetch: Any = lambda order: server.carry(order.transfer)  # noqa: E731

        def offer(order: Offer) -> bool:
            assert order.params["w"][0] == -2, "with the steps that were only taken here"
            if taken:
                server.model = {name: array.copy() for name, array in order.params.items()}
            return taken

        drive(server.steps.step(ONES, again=False), fetch)  # a local step: nothing travels
        receipt, orders = self.drive(
            server, Restarted("the server was restarted"), NotReady("it has no model"), offer, fetch
        )
        assert [type(order) for order in orders] == [Send, Send, Offer, Send]
        assert receipt is not None
        assert not receipt.used
        assert server.steps.params["w"][0] == -2, "each step counts once"
        drive(server.steps.flush(), fetch)
        assert server.model["w"][0] == -2

    def test_it_is_offered_ours_again_if_it_loses_them_before_they_are_fetched(self) -> None:
        server = Server(DIRECT)
        fetch: Any = lambda order: server.carry(order.transfer)  # noqa: E731

        def offer(order: Offer) -> bool:
            server.info.connection = ("me", server.info.connection[1] + 1)
            return True

        none = NotReady("it has no model")
        answers = [
            Restarted("the server was restarted"),
            none,
            offer,
            none,
            offer,
            none,
            offer,
            fetch,
        ]
        assert self.drive(server, *answers)[0] is None
        with pytest.raises(NotReady):  # it has taken the offer, and has no model
            self.drive(server, Restarted("the server was restarted"), none, True, none)

    @pytest.mark.parametrize(
        "error", [Restarted("the server was restarted"), NotReady("it has no model")]
    )
    def test_a_push_or_a_fetch_that_a_restarted_server_refuses(self, error: Exception) -> None:
        server = Server(DIRECT)
        fetch: Any = lambda order: server.carry(order.transfer)  # noqa: E731
        assert self.drive(server, error, fetch)[0] is None
        assert self.drive(server, error, fetch, again=False)[0] is not None
        server.version = 7
        answers: list[Any] = [error, fetch]

        def carry_out(order: Op) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer(order)

        assert drive(server.steps.refresh(), carry_out) == 7
        assert not answers

    @each_row("error", [Restarted("the server was restarted"), NotReady("it has no model")])
    @each_row("plan", sorted(PLANS))
    def test_the_rest_is_pushed_to_a_restarted_server(self, plan: str, error: Exception) -> None:
        """Steps that the server has not taken are pushed once, whenever it was restarted."""
        for refused in range(3):  # the number of the transfer that is refused
            server = Server(PLANS[plan])
            transfers = 0

            def carry_out(order: Op) -> Any:
                nonlocal transfers
                if isinstance(order, SendInBackground):
                    return BackgroundTransfer(order.transfer)
                background = order.background if isinstance(order, JoinBackground) else None
                transfers += 1
                if transfers - 1 != refused:  # noqa: B023
                    if isinstance(background, BackgroundTransfer):
                        return server.see_to(background)  # noqa: B023
                    return server.carry(order.transfer)  # noqa: B023
                if not isinstance(background, BackgroundTransfer):
                    raise error
                background.error, background.over = error, True
                return None

            for _ in range(3):
                drive(server.steps.step(ONES, again=False), carry_out)
            drive(server.steps.flush(), carry_out)
            drive(server.steps.flush(), carry_out)
            np.testing.assert_array_equal(server.model["w"], np.float32(-3))

    def test_what_failed_in_the_background_is_told_before_anything_is_done(self) -> None:
        server = Server(PLANS["local-free"])
        errands: list[BackgroundTransfer] = []

        def begin(order: SendInBackground) -> BackgroundTransfer:
            errands.append(BackgroundTransfer(order.transfer))
            return errands[-1]

        receipt, _orders = self.drive(server, begin)
        assert receipt is not None
        assert not receipt.pushed
        errands[0].error, errands[0].over = BadPush("too large"), True
        with pytest.raises(BadPush, match="too large"):
            self.drive(server)
        assert server.steps.steps == 1
        self.drive(server, begin)
        assert errands[1].transfer.arrays is not None
        assert errands[1].transfer.arrays["w"][0] == 2, "what was refused is pushed with the next"

    def test_a_wait_is_ordered_only_for_what_is_not_over(self) -> None:
        server = Server(PLANS["local-cycles"])
        answered: list[BackgroundTransfer] = []

        def begin(order: SendInBackground) -> BackgroundTransfer:
            answered.append(BackgroundTransfer(order.transfer))
            return answered[-1]

        def wait(order: JoinBackground) -> None:
            assert order.background is answered[0]
            server.see_to(answered[0])

        assert [type(order) for order in self.drive(server)[1]] == []
        assert [type(order) for order in self.drive(server, begin)[1]] == [SendInBackground]
        assert [type(order) for order in self.drive(server)[1]] == []
        assert [type(order) for order in self.drive(server, wait, begin)[1]] == [
            JoinBackground,
            SendInBackground,
        ]
        server.see_to(answered[1])
        assert [type(order) for order in self.drive(server)[1]] == []
        assert [type(order) for order in self.drive(server, begin)[1]] == [SendInBackground]


class TestOverlap:
    """Exchanges in the background under a policy that answers at once."""

    def setup_method(self) -> None:
        self.begun: list[BackgroundTransfer] = []
        self.waits = 0

    def carry_out(self, server: Server, order: Op) -> Any:
        """Begin what is to be begun; what is waited for is answered then."""
        if isinstance(order, SendInBackground):
            self.begun.append(BackgroundTransfer(order.transfer))
            return self.begun[-1]
        if isinstance(order, JoinBackground):
            self.waits += 1
            assert isinstance(order.background, BackgroundTransfer)
            return server.see_to(order.background)
        assert isinstance(order, Send)
        return server.carry(order.transfer)

    def step(self, server: Server, *, again: bool = False) -> Receipt | None:
        step = server.steps.step(ONES, again=again)
        return drive(step, lambda order: self.carry_out(server, order))

    def flush(self, server: Server) -> None:
        drive(server.steps.flush(), lambda order: self.carry_out(server, order))

    def fail(self, number: int, error: Exception) -> None:
        self.begun[number].error, self.begun[number].over = error, True

    @each_row("depth", [1, 2, 3])
    def test_so_many_are_under_way(self, depth: int) -> None:
        server = Server({}, depth)
        for number in range(1, 8):
            receipt = self.step(server)
            assert receipt is not None
            assert not receipt.pushed
            assert sum(not each.over for each in self.begun) == min(depth, number)
            answered = max(0, number - depth)
            assert self.waits == server.version == server.steps.params.version == answered
            assert receipt.version == answered
            sent = self.begun[-1].transfer
            assert sent.at.newest == max(0, answered - 1), "computed before the last answer"
        self.flush(server)
        assert server.version == server.steps.params.version == 7
        np.testing.assert_array_equal(server.model["w"], np.float32(-7))

    def test_an_answer_that_has_come_is_taken_at_once(self) -> None:
        server = Server({}, 1)
        for number in range(3):
            self.step(server)
            server.see_to(self.begun[-1])
            assert server.steps.params.version == number
        assert self.waits == 0

    def test_the_next_call_raises_what_failed_and_names_the_step(self) -> None:
        server = Server({}, 2)
        for _ in range(2):
            self.step(server)
        self.fail(0, BadPush("'w' holds nan", tensor="w"))
        with pytest.raises(
            BadPush, match="step 1, whose push was in the background: 'w' holds nan"
        ) as told:
            self.step(server)
        assert told.value.details == {"tensor": "w"}
        assert (server.steps.steps, len(self.begun)) == (2, 2), "nothing was done"
        self.step(server)
        self.step(server)
        assert server.version == 1, "the second arrived as if nothing had happened"
        self.fail(3, ConnectionLost("gone"))
        with pytest.raises(ConnectionLost, match=r"^step 4, .*gone"):
            self.flush(server)
        assert server.version == 2
        assert server.steps.params.version == 2
        self.flush(server)

    def test_the_end_waits_for_all_and_tells_of_all(self) -> None:
        server = Server({}, 3)
        for _ in range(3):
            self.step(server)
        self.fail(0, ConnectionLost("gone"))
        self.fail(2, BadPush("no"))
        with pytest.raises(ConnectionLost, match="step 1") as told:
            self.flush(server)
        assert told.value.__notes__ == ["step 3, whose push was in the background: no"]
        assert server.version == 1

    def test_a_wait_that_is_broken_off_is_taken_up_again(self) -> None:
        server = Server({}, 2)

        def interrupted(order: Op) -> Any:
            raise Broken

        for _ in range(2):
            self.step(server)
        for _ in range(2):
            with pytest.raises(Broken):
                drive(server.steps.step(ONES, again=False), interrupted)
        self.step(server)
        self.flush(server)
        assert server.version == 3, "a gradient whose step was broken off is not pushed"

    @pytest.mark.parametrize("again", [False, True])
    def test_a_restarted_server(self, again: bool) -> None:
        """All that was under way belonged to other parameters, and so does this gradient."""
        server = Server({}, 2)
        for _ in range(2):
            self.step(server)
        self.fail(0, Restarted("the server was restarted"))
        self.fail(1, Restarted("the server was restarted"))
        server.version = 7
        receipt = self.step(server, again=again)
        assert (receipt is None) == again
        assert receipt is None or not receipt.used
        assert server.steps.params.version == 7
        self.step(server, again=again)
        assert self.begun[2].transfer.at.newest == 7
        self.flush(server)
        assert server.version == 8

    def test_a_server_without_its_model_is_offered_ours(self) -> None:
        server = Server({}, 1)
        self.step(server)
        server.see_to(self.begun[0])
        self.step(server)
        self.fail(1, NotReady("it has no model"))
        answers: list[Any] = [
            NotReady("it has no model"),
            True,
            lambda order: server.carry(order.transfer),
        ]

        def carry_out(order: Op) -> Any:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer(order) if callable(answer) else answer

        receipt = drive(server.steps.step(ONES, again=False), carry_out)
        assert receipt is not None
        assert not receipt.used
        assert not answers


Event = st.sampled_from(
    ["answer", "answer", "answer", "lost before", "lost after", "refused", "closed", "interrupted"]
)


class Broken(BaseException):
    """As KeyboardInterrupt, or a task's cancellation."""


class Chaos:
    """Carries orders out, or breaks them off as it is told."""

    def __init__(self, server: Server, events: list[str]) -> None:
        self.server, self.events = server, events
        self.errands: list[BackgroundTransfer] = []

    def next(self) -> str:
        return self.events.pop() if self.events else "answer"

    def carry_out(self, order: Op) -> Any:
        event = self.next()
        if isinstance(order, SendInBackground):
            self.errands.append(BackgroundTransfer(order.transfer))
            return self.errands[-1]
        if isinstance(order, JoinBackground):
            if event in ("closed", "interrupted"):
                raise Broken
            assert isinstance(order.background, BackgroundTransfer)
            self.end(order.background, event)
            return None
        assert isinstance(order, Send)
        if event == "refused" and id(order.transfer) not in self.server.answered:
            raise BadPush("no")
        if event in ("lost before", "interrupted"):
            raise ConnectionLost("cut") if event == "lost before" else Broken
        receipt = self.server.carry(order.transfer)
        if event in ("lost after", "closed"):
            raise ConnectionLost("cut") if event == "lost after" else Broken
        return receipt

    def end(self, background: BackgroundTransfer, event: str) -> None:
        if background.over:
            return
        if event == "refused" and id(background.transfer) not in self.server.answered:
            background.error = BadPush("no")
        elif event == "lost before":
            background.error = ConnectionLost("cut")
        else:
            background.receipt = self.server.carry(background.transfer)
            if event == "lost after":
                background.receipt, background.error = None, ConnectionLost("cut")
        background.over = True


class TestBrokenOff:
    """Whatever is broken off, and when: no step is lost, and none counts twice."""

    @pytest.mark.slow
    @pytest.mark.parametrize("plan", sorted(PLANS))
    @DETERMINISTIC
    @given(events=st.lists(Event, max_size=40), idle=st.lists(Event, max_size=12))
    def test_every_step_arrives_once(self, plan: str, events: list[str], idle: list[str]) -> None:
        server = Server(PLANS[plan])
        chaos = Chaos(server, events)
        taken, apply = 0, server.steps.strategy.apply

        def counted(gradients: Mapping[str, Any], lr_factors: object) -> None:
            nonlocal taken
            apply(gradients)
            taken += 1

        server.steps.strategy.apply = counted  # type: ignore[method-assign]
        for _ in range(12):
            with contextlib.suppress(BadPush, ConnectionLost, Broken):
                drive(server.steps.step(ONES, again=False), chaos.carry_out)
            if idle and chaos.errands:
                chaos.end(chaos.errands[-1], idle.pop())
        flushed = False
        while not flushed:
            with contextlib.suppress(BadPush, ConnectionLost, Broken):
                drive(server.steps.flush(), chaos.carry_out)
                flushed = True
        np.testing.assert_array_equal(server.model["w"], np.float32(-taken))
        np.testing.assert_array_equal(server.model["b"], -taken)
