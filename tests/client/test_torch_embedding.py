"""The embedding layer: equal to a local one trained by the same rule, by one worker and by two."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.errors import UsageError
from tests.support import ServerThread

torch = pytest.importorskip("torch")

from aiops.client.torch import Embedding, RemoteOptimizer  # noqa: E402

ROWS, WIDTH = 1000, 4
IDS = torch.tensor([[1, 5, 5], [999, 1, 7]])


@pytest.fixture(autouse=True)
def _steady() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def asgd() -> Iterator[ServerThread]:
    with ServerThread(policy="asgd", lr=0.5, kernels="numpy") as server:
        yield server


class Scorer(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A model of an embedding and a linear layer."""

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.words, self.out = words, torch.nn.Linear(WIDTH, 1)

    def forward(self, ids: Any) -> Any:
        return self.out(self.words(ids)).mean(dim=1)


def model(**settings: Any) -> Scorer:
    return Scorer(Embedding(ROWS, WIDTH, **settings))


def local_of(remote: Scorer, opt: RemoteOptimizer, padding: int | None = None) -> Scorer:
    """The same model with all rows here."""
    layer = torch.nn.Embedding(ROWS, WIDTH, sparse=True)
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(rows_of(opt)))
        if padding is not None:
            layer.weight[padding] = 0
    layer.padding_idx = padding
    found = Scorer(layer)
    found.out.load_state_dict(remote.out.state_dict())
    return found


def rows_of(opt: RemoteOptimizer, name: str = "words") -> Any:
    return opt.worker.fetch_rows(name, np.arange(ROWS))


def loss_of(net: Any, ids: Any) -> Any:
    return ((net(ids) - 1.0) ** 2).sum()


def stepped(net: Any, optimizers: Any, ids: Any) -> None:
    for each in optimizers:
        each.zero_grad()
    loss_of(net, ids).backward()
    for each in optimizers:
        each.step()


def same(net: Scorer, local: Scorer, opt: RemoteOptimizer, but: int | None = None) -> None:
    mine, theirs = rows_of(opt), local.words.weight.detach().numpy()
    if but is not None:
        mine[but] = theirs[but] = 0
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(net.out.weight, local.out.weight, rtol=1e-4, atol=1e-6)


def batches(count: int, seed: int = 1) -> list[Any]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.integers(0, 60, (3, 4))) for _ in range(count)]


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adam"])
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch's Adagrad
def test_a_lone_worker_trains_as_a_local_embedding_does(optimizer: str) -> None:
    kinds = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "SparseAdam"}
    dense = {"sgd": "SGD", "adagrad": "Adagrad", "adam": "Adam"}
    chosen = {"optimizer": optimizer, "eps": 1e-30}  # whose place differs in torch's SparseAdam
    eps = {} if optimizer == "sgd" else {"eps": 1e-30}
    with ServerThread(policy="asgd", lr=0.05, set=chosen, kernels="numpy") as server:
        net = model(seed=3)
        with RemoteOptimizer(net, server.url) as opt:
            local = local_of(net, opt)
            peers = [
                getattr(torch.optim, kind)(list(part.parameters()), lr=0.05, **eps)
                for kind, part in (
                    (kinds[optimizer], local.words),
                    (dense[optimizer], local.out),
                )
            ]
            for ids in batches(6):
                stepped(net, [opt], ids)
                stepped(local, peers, ids)
            same(net, local, opt)
            [line] = opt.worker.stats()["tables"]
            assert line["version"] == 6
            assert line["rows_pushed"] == sum(len(np.unique(ids)) for ids in batches(6))


def test_two_workers_that_take_turns_equal_one(asgd: ServerThread) -> None:
    nets = [model(), model()]
    with RemoteOptimizer(nets[0], asgd.url) as one, RemoteOptimizer(nets[1], asgd.url) as two:
        local = local_of(nets[0], one)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        for turn, ids in enumerate(batches(6)):
            opt = (one, two)[turn % 2]
            opt.refresh()
            stepped(nets[turn % 2], [opt], ids)
            stepped(local, [sgd], ids)
        one.refresh()
        same(nets[0], local, one)
        np.testing.assert_array_equal(rows_of(one), rows_of(two))


def test_a_stale_gradient_carries_the_version_of_its_rows(asgd: ServerThread) -> None:
    nets = [model(), model()]
    with RemoteOptimizer(nets[0], asgd.url) as one, RemoteOptimizer(nets[1], asgd.url) as two:
        loss = loss_of(nets[0], IDS)
        stepped(nets[1], [two], IDS)
        stepped(nets[1], [two], IDS)
        loss.backward()
        seen: list[Any] = []
        push = one.worker.push_rows
        one.worker.push_rows = lambda *given, **more: seen.append(push(*given, **more)) or seen[-1]  # type: ignore[method-assign,func-returns-value]
        one.step()
    assert [receipt.staleness for receipt in seen] == [2]


def test_the_same_rows_in_several_passes_of_one_step(asgd: ServerThread) -> None:
    """As of one layer that is used twice, or of accumulated mini-batches."""
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        local = local_of(net, opt)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        for each, optimizer in ((net, opt), (local, sgd)):
            for ids in batches(3):
                loss_of(each, ids).backward()
            optimizer.step()
        same(net, local, opt)


def test_a_padding_row_is_zeros_and_stays_untrained(asgd: ServerThread) -> None:
    net = model(padding_idx=5)
    with RemoteOptimizer(net, asgd.url) as opt:
        before = rows_of(opt)
        local = local_of(net, opt, padding=5)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        assert not net.words(IDS)[0, 1:].any()
        for _ in range(2):
            stepped(net, [opt], IDS)
            stepped(local, [sgd], IDS)
        same(net, local, opt, but=5)
        np.testing.assert_array_equal(rows_of(opt)[5], before[5])
        stepped(net, [opt], torch.tensor([[5]]))


def test_gradients_that_were_cleared_or_never_computed_are_not_pushed(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        before = rows_of(opt)
        loss_of(net, IDS)
        loss_of(net, IDS).backward()
        output = loss_of(net, torch.tensor([[2, 3]]))
        opt.zero_grad()  # between a forward pass and its backward pass, as many loops do
        output.backward()
        opt.step()
        changed = np.flatnonzero((rows_of(opt) != before).any(axis=1))
        assert changed.tolist() == [2, 3]
        with torch.no_grad():
            assert not net(IDS).requires_grad
        opt.zero_grad()
        with pytest.raises(UsageError, match="no parameter has a gradient"):
            opt.step()


def test_a_grad_scaler_unscales_rows(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        local = local_of(net, opt)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for ids in batches(2):
            opt.zero_grad()
            scaler.scale(loss_of(net, ids)).backward()
            scaler.step(opt)
            scaler.update()
            stepped(local, [sgd], ids)
        same(net, local, opt)
        before = rows_of(opt)
        opt.zero_grad()
        scaler.scale(loss_of(net, IDS) * float("inf")).backward()
        scaler.step(opt)
        np.testing.assert_array_equal(rows_of(opt), before)


def test_a_scheduler_changes_the_step_of_rows_too(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        local = local_of(net, opt)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (opt, sgd)]
        for ids in batches(3):
            stepped(net, [opt], ids)
            stepped(local, [sgd], ids)
            for schedule in schedules:
                schedule.step()
        same(net, local, opt)


def test_a_closure(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        local = local_of(net, opt)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        for each, optimizer in ((net, opt), (local, sgd)):

            def closure(each: Any = each, optimizer: Any = optimizer) -> Any:
                optimizer.zero_grad()
                loss = loss_of(each, IDS)
                loss.backward()
                return loss

            assert optimizer.step(closure) > 0
        same(net, local, opt)


def test_embeddings_alone_and_parameters_that_are_no_module(asgd: ServerThread) -> None:
    left, right = Embedding(10, 2, seed=1), Embedding(10, 2, seed=2, dtype="float64")
    with RemoteOptimizer([], asgd.url, embeddings={"left": left, "right": right}) as opt:
        assert set(opt.worker.tables) == {"left", "right"}
        before = opt.worker.fetch_rows("right", [3])
        assert right(torch.tensor([3])).dtype == torch.float64
        for _ in range(2):
            opt.zero_grad()
            (left(torch.tensor([3])).sum() + right(torch.tensor([3])).sum()).backward()
            opt.step()
        np.testing.assert_allclose(opt.worker.fetch_rows("right", [3]), before - 1.0)
        assert opt.last is not None
        assert opt.last.version == 2
        assert left(torch.zeros(0, dtype=torch.long)).shape == (0, 2)


def test_state_goes_through_a_file(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        loss_of(net, IDS).backward()
        state = pickle.loads(pickle.dumps(opt.state_dict()))
        opt.step()
        opt.load_state_dict(state)
        stepped(net, [opt], IDS)
        assert opt.worker.stats()["tables"][0]["version"] == 2


def test_without_a_server_it_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"make RemoteOptimizer\(model, url\) before the first"):
        model()(IDS)
    with pytest.raises(UsageError, match="padding_idx must be an id"):
        Embedding(10, 2, 10)
    with pytest.raises(UsageError, match="width must be"):
        Embedding(10, 0)


def test_an_observer_evaluates(asgd: ServerThread) -> None:
    net = model(seed=4)
    with RemoteOptimizer(net, asgd.url) as opt:
        stepped(net, [opt], IDS)
        elsewhere = pickle.loads(pickle.dumps(copy.deepcopy(net)))
        with pytest.raises(UsageError, match="has no server yet"):
            elsewhere(IDS)
        with aiops.Client(asgd.url) as client:
            elsewhere.words.attach(client, "words")
            torch.testing.assert_close(elsewhere(IDS), net(IDS))
            loss_of(elsewhere, IDS).backward()
            with pytest.raises(UsageError, match=r"no table 'word'; did you mean 'words'"):
                elsewhere.words.attach(client, "word")
            with pytest.raises(UsageError, match="but this layer has"):
                Embedding(10, 4).attach(client, "words")
        assert "'words'" in repr(net)
        assert opt.worker.stats()["tables"][0]["version"] == 1


def test_what_cannot_be_looked_up(asgd: ServerThread) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url):
        with pytest.raises(UsageError, match="has no row 1000"):
            net(torch.tensor([[1000]]))
        with pytest.raises(UsageError, match="ids must be integers, not float32"):
            net(torch.tensor([[1.0]]))
    with pytest.raises(UsageError, match="is a Linear, no Embedding"):
        RemoteOptimizer(net, asgd.url, embeddings={"out": net.out})
    with pytest.raises(UsageError, match="is in the module: leave it out"):
        RemoteOptimizer(net, asgd.url, embeddings={"out": net.words})


def test_more_rows_than_one_message_carries(
    asgd: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = model()
    with RemoteOptimizer(net, asgd.url) as opt:
        local = local_of(net, opt)
        sgd = torch.optim.SGD(local.parameters(), lr=0.5)
        monkeypatch.setattr("aiops.client.embedding_rows.table_of", lambda *_: _small(net))
        object.__setattr__(net.words.table, "most", 2)
        stepped(net, [opt], IDS)
        stepped(local, [sgd], IDS)
        monkeypatch.undo()
        same(net, local, opt)
        assert opt.worker.stats()["tables"][0]["version"] == 2


def _small(net: Scorer) -> Any:
    return net.words.table
