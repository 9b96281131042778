"""Copies between the host and devices, and the memory that is page-locked for them."""

from __future__ import annotations

import gc
import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from aiops.client import torch_arrays  # noqa: E402
from aiops.client.params import Params  # noqa: E402
from aiops.client.torch_arrays import (  # noqa: E402
    finish_copies,
    host_copy,
    lock_cuda_pages,
    page_lock,
    to_array,
)
from aiops.model.layout import Layout  # noqa: E402

LAYOUT = Layout([("a", "float32", (8,)), ("b", "float32", (4, 8)), ("c", "float32", (8,))])


class Runtime:
    """Stands for `torch.cuda`: notes what is locked, on which device."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, dict[int, int]()
        self.current = "cuda:0"
        self.used: set[str] = set()
        self.told = 0

    def cudart(self) -> Runtime:
        return self

    @contextmanager
    def device(self, device: str) -> Iterator[None]:
        self.current = device
        yield
        self.current = "cuda:0"

    def cudaHostRegister(self, begin: int, nbytes: int, flags: int) -> int:
        assert flags == 1
        assert begin not in self.locked
        self.used.add(self.current)
        if not self.status:
            self.locked[begin] = nbytes
        return self.status

    def cudaHostUnregister(self, begin: int) -> int:
        self.used.add(self.current)
        del self.locked[begin]
        return 0

    def zeros(self, _size: int, device: str) -> None:
        self.used.add(device)
        self.told += 1


@pytest.fixture
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime(getattr(request, "param", 0))
    fake = types.SimpleNamespace(zeros=made.zeros, cuda=made)
    monkeypatch.setattr(torch_arrays, "_torch", fake)
    monkeypatch.setattr(torch_arrays, "_locked_pages_stay", lambda: True)
    return made


@pytest.mark.parametrize("runtime", [0, 712], indirect=True)
def test_an_arena_is_locked_once_and_as_long_as_it_lives(runtime: Runtime) -> None:
    params = Params(LAYOUT)
    begin = params.arena.data.ctypes.data
    for _ in range(2):
        page_lock(params, ["a", "b", "c"], "cuda:3")
        page_lock(Params(LAYOUT, params.arena), ["a"], "cuda:3")  # as room is given each step
    assert runtime.locked == ({} if runtime.status else {begin: LAYOUT.nbytes})
    assert runtime.told == (runtime.status != 0)  # the error is taken from the device
    del params
    gc.collect()
    assert not runtime.locked
    assert runtime.used == {"cuda:3"}  # no other device is woken


def test_what_is_not_copied_is_not_locked(runtime: Runtime) -> None:
    params = Params(LAYOUT)
    on, off = types.SimpleNamespace(is_cuda=True, device="cuda:1"), torch.zeros(1)
    lock_cuda_pages(None, {"a": on})
    lock_cuda_pages(params, {"a": off, "b": off})
    assert not runtime.locked
    lock_cuda_pages(params, {"a": off, "b": on, "c": off})
    assert runtime.locked == {params["b"].ctypes.data: 128}


def test_a_fork_unlocks_nothing(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    params = Params(LAYOUT)
    page_lock(params, ["a"], "cuda:0")
    mine = os.getpid()
    monkeypatch.setattr(torch_arrays.os, "getpid", lambda: mine + 1)
    del params
    gc.collect()
    assert runtime.locked


@pytest.mark.parametrize(
    ("platform", "release", "stays"),
    [
        *(("linux", "5.8.0-generic", False), ("linux", "5.9", True), ("linux", "6.18.44-fc", True)),
        *(("linux", "4.4.0", False), ("linux", "unknown", False), ("darwin", "", True)),
    ],
)
def test_private_pages_are_locked_where_a_fork_leaves_them(
    monkeypatch: pytest.MonkeyPatch, platform: str, release: str, stays: bool
) -> None:
    monkeypatch.setattr(torch_arrays.sys, "platform", platform)
    monkeypatch.setattr(torch_arrays.os, "uname", lambda: types.SimpleNamespace(release=release))
    assert torch_arrays._locked_pages_stay() == stays


def test_those_that_are_moved_are_not_locked_unless_they_are_shared(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_arrays, "_locked_pages_stay", lambda: False)
    private, shared = Params(LAYOUT), Params(LAYOUT)
    shared.arena.segment = object()
    page_lock(private, ["a"], "cuda:0")
    page_lock(shared, ["a"], "cuda:0")
    assert list(runtime.locked) == [shared["a"].ctypes.data]


def test_a_tensor_of_the_host_is_its_own_copy() -> None:
    tensor, room = torch.ones(4, 8), Params(LAYOUT)
    assert host_copy(tensor, room["b"]) is tensor
    finish_copies([tensor.device])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_copies_from_and_to_a_device() -> None:
    room: Any = Params(LAYOUT)
    tensor = torch.randn(4, 8, device="cuda")
    lock_cuda_pages(room, {"b": tensor})
    assert torch.from_numpy(room["b"]).is_pinned()
    found = host_copy(tensor, room["b"])
    finish_copies([tensor.device])
    assert found.data_ptr() == room["b"].ctypes.data
    np.testing.assert_array_equal(to_array(found), tensor.cpu().numpy())
    assert host_copy(tensor, None).device.type == "cpu"
