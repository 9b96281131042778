"""Models as files."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiops.errors import UsageError
from aiops.model.layout import dtype_named
from aiops.model.tables import NamedTable, Table, Tables
from aiops.serving.safetensors_io import read_model, read_tables, write_model
from tests.rows import each_row


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


def test_an_empty_path_is_no_file() -> None:
    with pytest.raises(UsageError, match=r"'\.' is a folder: name a file in it"):
        write_model(Path(""), {"w": np.ones(2, np.float32)}, 1)


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_model(path, {"w": np.ones(2, np.float32)}, 1)
    with pytest.raises(UsageError, match="cannot write the model"):
        write_model(path / "below", {"w": np.zeros(2, np.float32)}, 2)
    np.testing.assert_array_equal(read_model(path)["w"], 1)


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole.safetensors", tmp_path / "cut.safetensors"
    write_model(whole, {"w": np.arange(9, dtype=np.float32), "b": np.ones(2, np.float16)}, 1)
    content = whole.read_bytes()
    for length in range(len(content)):
        cut.write_bytes(content[:length])
        with pytest.raises(UsageError, match="not a safetensors file"):
            read_model(cut)


def test_the_new_name_survives_a_loss_of_power(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The data are synced before the rename, and the folder, which has the name, after it."""
    path, calls = tmp_path / "model.safetensors", list[str]()
    fsync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        calls.append(f"sync {os.readlink(f'/proc/self/fd/{descriptor}')}")
        fsync(descriptor)

    def renamed(old: Any, new: Any) -> None:
        calls.append(f"rename {old} to {new}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    write_model(path, {"w": np.ones(2, np.float32)}, 1)
    half_done = tmp_path / f".{path.name}.{os.getpid()}.part"
    assert calls == [f"sync {half_done}", f"rename {half_done} to {path}", f"sync {tmp_path}"]


class TestOrder:
    def test_is_that_of_the_model(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        names = [f"layer{number:02}" for number in np.random.default_rng(0).permutation(50)]
        write_model(path, {name: np.ones(3, np.float32) for name in names}, 1)
        assert list(read_model(path)) == names

    def test_of_a_file_of_another_program_is_that_of_its_data(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        names = ["second", "empty.b", "first", "empty.a", "third"]
        offsets = {"first": 0, "second": 4, "empty.a": 8, "empty.b": 8, "third": 8}
        rows = {}
        for name in names:
            size = 0 if name.startswith("empty") else 1
            offset = offsets[name]
            rows[name] = {
                "dtype": "F32",
                "shape": [size],
                "data_offsets": [offset, offset + 4 * size],
            }
        header = json.dumps(rows).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
        assert list(read_model(path)) == ["first", "second", "empty.a", "empty.b", "third"]

    def test_of_a_file_that_another_program_has_changed(self, tmp_path: Path) -> None:
        """What its metadata name goes first, and what it does not have is no matter."""
        from safetensors.numpy import save_file

        path = tmp_path / "model.safetensors"
        arrays = {name: np.ones(1, np.float32) for name in ("a", "b", "c", "d")}
        save_file(arrays, path, {"aiops_order": '["d", "gone", "b"]'})
        assert list(read_model(path)) == ["d", "b", "a", "c"]

    @each_row("order", ["{", "7", '{"a": 1}', "null"])
    def test_that_cannot_be_read(self, order: str, tmp_path: Path) -> None:
        from safetensors.numpy import save_file

        path = tmp_path / "model.safetensors"
        save_file({"a": np.ones(1, np.float32)}, path, {"aiops_order": order})
        with pytest.raises(UsageError, match="metadata are damaged"):
            read_model(path)


class TestTables:
    TABLE = Table(100, 2, "float64", "normal", 0.5, 9)
    IDS, ROWS = np.array([3, 50, 99]), np.arange(6.0).reshape(3, 2)

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        """A file with a tensor and a table of which three rows are stored."""
        path = tmp_path / "model.safetensors"
        stored = [(NamedTable("t/ä", 0, self.TABLE), self.IDS, self.ROWS)]
        write_model(path, {"w": np.ones(2, np.float32)}, 1, stored)
        return path

    def test_they_come_back_as_they_were(self, path: Path) -> None:
        [(described, ids, rows)] = read_tables(path)
        assert Tables.from_description([described])["t/ä"].table == self.TABLE
        assert ids.tobytes() == self.IDS.tobytes()
        assert rows.tobytes() == self.ROWS.tobytes()
        assert set(read_model(path)) == {"w"}

    def test_a_file_without_any(self, tmp_path: Path) -> None:
        path = tmp_path / "plain.safetensors"
        write_model(path, {"w": np.ones(2, np.float32)}, 1)
        assert read_tables(path) == []

    def test_other_libraries_can_read_them(self, path: Path) -> None:
        from safetensors.numpy import load_file

        found = load_file(path)
        np.testing.assert_array_equal(found["tables/t/ä/ids"], self.IDS)
        np.testing.assert_array_equal(found["tables/t/ä/rows"], self.ROWS)

    def test_a_tensor_of_that_name(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        stored = [(NamedTable("t", 0, self.TABLE), self.IDS, self.ROWS)]
        with pytest.raises(UsageError, match="a tensor has its name"):
            write_model(path, {"tables/t/ids": np.ones(2, np.float32)}, 1, stored)

    @each_row(
        ("metadata", "said"),
        [
            ('[["t", 100, 2, "float64", "zeros", 0.0, 0]]', "'t' is damaged"),
            ("[[]]", "metadata are damaged"),
            ("{", "metadata are damaged"),
            ("7", "metadata are damaged"),
            (
                '[["t/ä", 0, 2, "float64", "zeros", 0.0, 0]]',
                "damaged: .*rows must be a whole number from 1",
            ),
        ],
    )
    def test_a_description_that_lies(self, tmp_path: Path, metadata: str, said: str) -> None:
        from safetensors.numpy import save_file

        path = tmp_path / "model.safetensors"
        held = {"tables/t/ä/ids": self.IDS, "tables/t/ä/rows": self.ROWS}
        save_file(held, path, {"aiops_tables": metadata})
        with pytest.raises(UsageError, match=said):
            read_tables(path)
