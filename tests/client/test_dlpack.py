"""Gradients and models that are other frameworks' tensors: `aiops.client.dlpack`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiops
from aiops.client.dlpack import on_host
from aiops.errors import UsageError
from aiops.model.layout import Array
from tests.rows import each_row
from tests.support import ServerThread

CPU, CUDA = 1, 2


class Tensor:
    """A tensor of a framework that copies from its device to the host if it is asked to."""

    def __init__(self, array: Array, kind: int = CUDA, *, copies: bool = True) -> None:
        self.array, self.kind, self.copies = array, kind, copies

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.kind, 0

    def __dlpack__(self, *, dl_device: Any = None, **_others: Any) -> Any:
        if self.kind == CPU:
            return self.array.__dlpack__()
        if not self.copies or dl_device != (CPU, 0):
            raise BufferError("copies to another device are not supported")
        return self.array.copy().__dlpack__()

    def __array__(self, *_arguments: Any, **_options: Any) -> Array:
        raise TypeError("can't convert device type tensor to numpy")


def test_an_array_is_itself() -> None:
    array = np.ones(3)
    assert on_host("w", array) is array
    assert on_host("w", [1.0, 2.0]).tolist() == [1.0, 2.0]


def test_a_tensor_on_the_host_is_read_where_it_is() -> None:
    array = np.arange(6.0).reshape(2, 3)
    found = on_host("w", Tensor(array, CPU))
    assert np.shares_memory(found, array)
    assert found.tolist() == array.tolist()


def test_a_tensor_on_a_device_is_copied_by_its_framework() -> None:
    array = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    found = on_host("w", Tensor(array))
    assert not np.shares_memory(found, array)
    assert (found.dtype, found.tolist()) == (np.float32, array.tolist())


def test_what_cannot_be_had_is_named_with_its_device_and_why() -> None:
    with pytest.raises(UsageError) as caught:
        on_host("conv.weight", Tensor(np.ones(3), copies=False))
    for part in ("'conv.weight'", "tests tensor", "a CUDA device", "are not supported", "on the"):
        assert part in str(caught.value)
    with pytest.raises(UsageError, match="on device 14:0 cannot"):
        on_host("w", Tensor(np.ones(3), 14, copies=False))


@each_row(
    "how",
    [
        {"policy": "asgd"},
        {"policy": "asgd", "push_codec": ("int8",)},
        {"policy": "fasgd", "gate": "periodic:k_push=2"},
        {"policy": "downpour"},
        {"policy": "easgd", "workers": 1},
        {"policy": "diloco", "workers": 1},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
def test_a_worker_trains_with_tensors_of_a_device(how: dict[str, Any]) -> None:
    ones = np.ones((2, 3), np.float32)
    found = []
    for make in (Tensor, np.copy):
        with (
            ServerThread(**how) as server,
            aiops.Worker(server.url, {"w": make(ones)}) as worker,  # type: ignore[dict-item]
        ):
            for _ in range(3):
                worker.step({"w": make(ones)})  # type: ignore[dict-item]
            found.append(worker.params["w"].tolist())
    assert found[0] == found[1]
    assert found[0] != ones.tolist()


def test_a_tensor_of_pytorchs_on_the_host_is_read_where_it_is() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3)
    found = on_host("w", tensor)
    tensor += 1
    assert found.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("how", ["requires_grad", "bfloat16"])
def test_what_numpy_cannot_read_of_pytorchs_is_refused(how: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.ones(3)
    tensor = tensor.bfloat16() if how == "bfloat16" else tensor.requires_grad_()
    with pytest.raises(UsageError, match=r"'w': this torch tensor on the host cannot be read"):
        on_host("w", tensor)


def test_jax_arrays_of_every_float() -> None:
    numpy = pytest.importorskip("jax.numpy")
    for name in ("float32", "float16", "bfloat16"):
        found = on_host("w", numpy.ones(3, name))
        assert (found.dtype.name, found.astype(float).tolist()) == (name, [1.0, 1.0, 1.0])
