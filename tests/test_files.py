"""Models as files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.files import read_model, write_model
from aiops.layout import dtype_named


def test_every_dtype_comes_back_as_it_was(tmp_path: Path) -> None:
    arrays = {
        name: np.arange(6).reshape(2, 3).astype(dtype_named(name))
        for name in ("float64", "float32", "float16", "bfloat16")
    }
    path = tmp_path / "deep" / "model.safetensors"
    write_model(path, arrays, version=7)
    found = read_model(path)
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert found[name].tobytes() == array.tobytes()
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]


def test_a_file_that_is_not_there_or_not_one_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_model(tmp_path / "none.safetensors")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"hello, this is no safetensors file")
    with pytest.raises(UsageError, match="not a safetensors file"):
        read_model(bad)


def test_tensors_that_cannot_be_trained_are_named(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "ints.safetensors"
    save_file({"steps": np.arange(3)}, path)
    with pytest.raises(UsageError, match="'steps' is I64"):
        read_model(path)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {"w": np.ones(2, np.float32)}, 1)
    with pytest.raises(UsageError, match="cannot write the model"):
        write_model(path / "below", {"w": np.zeros(2, np.float32)}, 2)
    np.testing.assert_array_equal(read_model(path)["w"], 1)
