"""Work that is captured on a device: what PyTorch is asked, and what happens when it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest

torch = pytest.importorskip("torch")

from aiops.client.strategies.torch_graphs import Graphs  # noqa: E402

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Device:
    """Stands for `torch.cuda`: notes what it is asked, on which stream."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.said = fails, list[str]()
        self.current: Any = "user's"

    def Stream(self, device: str) -> Any:
        said, name = self.said, f"stream of {device}"

        class Stream(str):
            __slots__ = ()

            def wait_stream(self, other: str) -> None:
                said.append(f"waits for {other}")

        return Stream(name)

    def graph_pool_handle(self) -> str:
        return "pool"

    def CUDAGraph(self) -> Any:
        return type("Graph", (), {"replay": lambda graph: self.said.append("replay")})()

    def current_stream(self, device: str) -> Any:
        return self.current

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    @contextmanager
    def device(self, device: str) -> Iterator[None]:
        self.said.append(f"on {device}")
        yield

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def graph(self, graph: Any, pool: Any, stream: Any, *, capture_error_mode: str) -> Any:
        outer = self

        class Graph:
            def __enter__(self) -> Self:
                outer.current = stream
                if outer.fails == "begin":
                    raise RuntimeError("another one captures")
                outer.said.append(f"captures, {pool}, {capture_error_mode}")
                return self

            def __exit__(self, *_error: object) -> None:
                if outer.fails == "end":  # as PyTorch does, before it restores the stream
                    raise RuntimeError("the capture was invalidated")
                outer.current = "user's"

        return Graph()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Device, Graphs]]:
    def make(fails: str = "") -> tuple[Device, Graphs]:
        device = Device(fails)
        fake = type("Torch", (), {"cuda": device})
        monkeypatch.setattr("aiops.client.strategies.torch_graphs._torch", fake)
        return device, Graphs("cuda:1")

    return make


def test_work_is_done_once_before_on_the_stream_of_its_device(
    asked: Callable[..., tuple[Device, Graphs]],
) -> None:
    device, graphs = asked()
    streams: list[Any] = []

    def work() -> list[int]:
        streams.append(device.current)
        return [len(streams)]

    found = graphs.captured(work)
    assert found is not None
    replay, results = found
    assert (streams, results) == (["stream of cuda:1"] * 2, [2])
    assert device.said[1:] == ["on cuda:1", "waits for user's", "captures, pool, thread_local"]
    replay()
    assert device.said[-1] == "replay"
    assert device.current == "user's"


@pytest.mark.parametrize("fails", ["begin", "end", "work"])
def test_what_cannot_be_captured_is_none_and_the_stream_is_as_before(
    asked: Callable[..., tuple[Device, Graphs]], fails: str
) -> None:
    device, graphs = asked(fails)

    def work() -> list[int]:
        if fails == "work":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return []

    assert graphs.captured(work) is None
    assert device.current == "user's"


@GPU
def test_a_graph_does_the_work_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs, given = Graphs(device), torch.ones(64, 64, device=device)
    found = graphs.captured(lambda: [given @ given])
    assert found is not None
    replay, (product,) = found
    for value in (1.0, 2.0, 3.0):
        given.fill_(value)
        replay()
        torch.testing.assert_close(product.cpu(), torch.full((64, 64), 64 * value * value))


@GPU
def test_without_memory_nothing_is_captured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = Graphs(device)
    before = torch.cuda.current_stream(device)
    assert graphs.captured(lambda: [torch.empty(1 << 50, device=device)]) is None
    assert torch.cuda.current_stream(device) == before
    assert graphs.captured(lambda: [torch.ones(4, device=device) + 1]) is not None
