"""The PyTorch face: an iterable data set, and a loader whose processes take tasks themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from aiops.client import ModelAverager  # noqa: E402
from aiops.client.torch import RemoteOptimizer  # noqa: E402
from aiops.data.torch import ShardedDataset, ShardedLoader  # noqa: E402
from aiops.errors import UsageError  # noqa: E402
from tests.support import ServerThread  # noqa: E402

EXAMPLES, EPOCHS = 40, 2


class Squares(Dataset[Any]):
    """A data set in the map style."""

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), index**2


def train(opt: RemoteOptimizer, model: Any, loader: Any, dataset: ShardedDataset) -> Counter[Any]:
    """Take a step with each mini-batch; return what was seen, by epoch."""
    seen: Counter[Any] = Counter()
    for x, y in loader:
        assert isinstance(x, torch.Tensor)
        assert (y == (x**2).long()).all()
        opt.zero_grad()
        model(x[:, None].float()).sum().backward()
        opt.step()
        seen.update((dataset.epoch, int(value)) for value in x)
    return seen


@pytest.fixture
def model() -> Any:
    return torch.nn.Linear(1, 1)


@pytest.fixture
def opt(model: Any) -> Iterator[RemoteOptimizer]:
    """An optimizer at a server whose steps are too small to see."""
    with (
        ServerThread(policy="asgd", set={"lr": 1e-9}) as server,
        RemoteOptimizer(model, server.url) as found,
    ):
        yield found


ALL = Counter((epoch, x) for epoch in range(EPOCHS) for x in range(EXAMPLES))


@pytest.mark.parametrize("form", ["arrays", "tensors", "items"])
@pytest.mark.parametrize("workers", [0, 2])
def test_each_example_once_an_epoch(
    opt: RemoteOptimizer, model: Any, form: str, workers: int
) -> None:
    x = np.arange(EXAMPLES, dtype=np.float32)
    y = (x**2).astype(np.int64)
    data = {"arrays": (x, y), "tensors": (torch.tensor(x), torch.tensor(y)), "items": Squares()}
    dataset = ShardedDataset(opt, data[form], batch_size=3, epochs=EPOCHS, task_size=8)
    loader = ShardedLoader(dataset, num_workers=workers)
    assert isinstance(loader, DataLoader)
    assert train(opt, model, loader, dataset) == ALL
    [row] = opt.worker.stats()["data_sets"]
    assert (row["epoch"], row["returned"]) == (EPOCHS, 0)


def test_a_plain_data_loader(opt: RemoteOptimizer, model: Any) -> None:
    x = torch.arange(EXAMPLES)
    dataset = ShardedDataset(opt, (x, x**2), batch_size=8, epochs=EPOCHS)
    assert train(opt, model, DataLoader(dataset, batch_size=None), dataset) == ALL


@pytest.mark.parametrize("used_before", [False, True])
def test_a_plain_data_loader_with_processes_is_refused(
    opt: RemoteOptimizer, used_before: bool
) -> None:
    x = torch.arange(EXAMPLES)
    dataset = ShardedDataset(opt, (x, x**2), batch_size=8, epochs=1)
    if used_before:
        next(iter(ShardedLoader(dataset, num_workers=1)))
    with pytest.raises(UsageError, match=r"use\s+aiops.data.torch.ShardedLoader"):
        next(iter(DataLoader(dataset, batch_size=None, num_workers=1)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_model_averager(model: Any, workers: int) -> None:
    x = torch.arange(EXAMPLES)
    seen: Counter[Any] = Counter()
    with (
        ServerThread(policy="average", set={"interval": 0.05, "grace": 0.05}) as server,
        ModelAverager(server.url, model) as averager,
    ):
        dataset = ShardedDataset(averager, x, batch_size=8, epochs=EPOCHS)
        for batch in ShardedLoader(dataset, num_workers=workers):
            with averager.step(), torch.no_grad():
                model.weight += 1
            seen.update((dataset.epoch, int(value)) for value in batch)
        [row] = server.call(lambda s: s.engine.report()["data_sets"])
    assert seen == ALL
    assert (row["epoch"], row["returned"]) == (EPOCHS, 0)


def test_what_waits_in_a_loader_that_is_left_goes_back(opt: RemoteOptimizer, model: Any) -> None:
    x = torch.arange(EXAMPLES)
    dataset = ShardedDataset(opt, (x, x**2), batch_size=4, epochs=1)
    for batch, _square in ShardedLoader(dataset, num_workers=1):
        model(batch[:, None].float()).sum().backward()
        opt.step()
        break
    [row] = opt.worker.stats()["data_sets"]
    assert (row["seen"], row["examples_under_way"]) == (4, 0)


def test_settings_that_are_the_data_sets(opt: RemoteOptimizer) -> None:
    dataset = ShardedDataset(opt, torch.arange(3), batch_size=4)
    with pytest.raises(UsageError, match="batch_size is the data set's"):
        ShardedLoader(dataset, batch_size=4)
    with pytest.raises(UsageError, match="batch_size must be a whole number"):
        ShardedDataset(opt, torch.arange(3), batch_size=4.0)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="in_order"):
        ShardedLoader(dataset, in_order=False)
