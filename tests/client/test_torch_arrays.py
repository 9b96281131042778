"""Copies between the host and devices, and the memory that is page-locked for them."""

import gc
import types
from collections.abc import Iterator

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from aiops.client.params import Params  # noqa: E402
from aiops.client.torch_arrays import finish_copies, host_copy, page_lock, to_array  # noqa: E402
from aiops.model.layout import Layout  # noqa: E402

LAYOUT = Layout([("w", "float32", (4, 8)), ("b", "float32", (8,))])


class Runtime:
    """Notes what is registered, as CUDA's runtime does."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, dict[int, int]()

    def cudaHostRegister(self, begin: int, nbytes: int, flags: int) -> int:
        assert flags == 0
        assert begin not in self.locked
        if not self.status:
            self.locked[begin] = nbytes
        return self.status

    def cudaHostUnregister(self, begin: int) -> int:
        del self.locked[begin]
        return 0


@pytest.fixture(params=[0, 712])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runtime]:
    made = Runtime(request.param)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    told: list[object] = []
    fake = types.SimpleNamespace(zeros=lambda *_, device: told.append(device), cuda=torch.cuda)
    monkeypatch.setattr("aiops.client.torch_arrays._torch", fake)
    yield made
    assert told == (["cuda"] if made.status else [])  # the error is taken from the device


def test_an_arena_is_locked_once_and_as_long_as_it_lives(runtime: Runtime) -> None:
    params = Params(LAYOUT)
    begin = params.arena.data.ctypes.data
    for _ in range(2):
        page_lock(params)
        page_lock(Params(LAYOUT, params.arena))  # as room is given, for each step
    assert runtime.locked == ({} if runtime.status else {begin: LAYOUT.nbytes})
    del params
    gc.collect()
    assert not runtime.locked


def test_nothing_is_locked_of_a_model_without_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("it was"))
    page_lock(Params(Layout([], empty=True)))


def test_a_tensor_of_the_host_is_its_own_copy() -> None:
    tensor, room = torch.ones(4, 8), Params(LAYOUT)
    assert host_copy(tensor, room["w"]) is tensor
    finish_copies([tensor.device])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_and_to_a_device() -> None:
    room = Params(LAYOUT)
    page_lock(room)
    assert torch.from_numpy(room["w"]).is_pinned()
    tensor = torch.randn(4, 8, device="cuda")
    found = host_copy(tensor, room["w"])
    finish_copies([tensor.device])
    assert found.data_ptr() == room["w"].ctypes.data
    np.testing.assert_array_equal(to_array(found), tensor.cpu().numpy())
    assert host_copy(tensor, None).device.type == "cpu"
