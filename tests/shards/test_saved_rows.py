"""Models whose rows lie on several servers, saved and begun with again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import aiops
from aiops import testing
from aiops.errors import RemoteProtocolError
from aiops.model.parts import Part
from aiops.model.row_shards import GIVEN_ROWS, SPREAD_TABLES, shards_of
from aiops.model.tables import Table, Tables
from aiops.shards.follower_rows import rows_given
from aiops.shards.stored_rows import CollectedRows
from aiops.store import sparse_table
from aiops.wire.server_messages import LoadShard, StoredRows
from tests.rows import each_row

TABLES = {"a": Table(1000, 4), "b": Table(50, 2, "float64"), "none": Table(9, 1)}
DENSE = {"w": np.arange(12, dtype=np.float32).reshape(6, 2)}
IDS = np.arange(0, 1000, 7)
COMMON: dict[str, Any] = {"policy": "asgd", "port": 0, "kernels": "numpy", "set": {"lr": 1}}
SPREAD = {**COMMON, "shards": 3, "shard_bytes": 1, "spread_tables": True}


async def trained(dense: Any, path: Path, **others: Any) -> np.ndarray:
    """Train a little, and have the model saved; return all rows of the first table."""
    async with (
        aiops.serve(**SPREAD, save=path, **others) as server,
        aiops.AsyncWorker(server.url, dense, tables=TABLES) as worker,
    ):
        await worker.push_rows("a", IDS, np.ones((len(IDS), 4), np.float32))
        await worker.push_rows("b", [3, 4], np.ones((2, 2)))
        return await worker.fetch_rows("a", np.arange(1000))


async def fetched(dense: Any, **config: Any) -> tuple[np.ndarray, dict[str, int]]:
    """Return all rows of the first table, and how many rows of each are stored."""
    async with (
        aiops.serve(**config) as server,
        aiops.AsyncWorker(server.url, dense, tables=TABLES) as worker,
    ):
        rows = await worker.fetch_rows("a", np.arange(1000))
        return rows, {line["name"]: line["made"] for line in (await worker.stats())["tables"]}


@pytest.mark.parametrize("dense", [DENSE, {}], ids=["tensors", "tables alone"])
def test_a_saved_model_begins_again_on_any_number_of_servers(
    tmp_path: Path, dense: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is that of one server: rows in the order of their numbers, sent in pieces."""
    monkeypatch.setattr(sparse_table, "COPIED", 240)
    path = tmp_path / "model.safetensors"
    rows = testing.run(trained(dense, path))
    found = load_file(path)
    assert found["tables/a/ids"].tolist() == IDS.tolist()
    assert np.array_equal(found["tables/a/rows"], rows[IDS])
    assert [len(found[f"tables/{name}/ids"]) for name in TABLES] == [len(IDS), 2, 0]
    for config in (SPREAD, {**SPREAD, "shards": 2}, COMMON):
        again, made = testing.run(fetched(dense, **config, init=path))
        assert np.array_equal(again, rows)
        assert made == {"a": len(IDS), "b": 2, "none": 0}


def test_each_server_begins_with_its_own_rows(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    testing.run(trained(DENSE, path))

    async def held() -> list[list[int]]:
        async with aiops.serve(**SPREAD, init=path) as server:
            async with aiops.AsyncClient(server.url) as client:
                await client.fetch_rows("a", np.arange(9))
            return [server.engine.tables[0].stored_ids().tolist()]

    [ids] = testing.run(held())
    assert ids == IDS[shards_of(IDS, 3) == 0].tolist()


def test_the_rows_of_a_saved_model_are_kept_in_a_state(tmp_path: Path) -> None:
    """Each follower journals what it began with, and its lead does not send it again."""
    path, state = tmp_path / "model.safetensors", tmp_path / "state"
    rows = testing.run(trained(DENSE, path))

    async def twice() -> tuple[np.ndarray, np.ndarray, dict[str, int]]:
        async with (
            aiops.serve(**SPREAD, init=path, state=state) as server,
            aiops.AsyncWorker(server.url, DENSE, tables=TABLES) as worker,
        ):
            await worker.push_rows("a", IDS[:9], np.ones((9, 4), np.float32))
            after = await worker.fetch_rows("a", np.arange(1000))
        return after, *await fetched(DENSE, **SPREAD, state=state)

    after, again, made = testing.run(twice())
    assert not np.array_equal(after, rows)
    assert np.array_equal(again, after)
    assert made["a"] == len(IDS)


def test_rows_are_saved_at_intervals_beside_pushes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    rows = testing.run(trained(DENSE, path, save_every=0.01))
    assert np.array_equal(load_file(path)["tables/a/rows"], rows[IDS])


@each_row(
    "plan",
    [
        {GIVEN_ROWS: (1,)},
        {GIVEN_ROWS: (1,), SPREAD_TABLES: Tables(TABLES).described},
        {GIVEN_ROWS: (1001, 0, 0), SPREAD_TABLES: Tables(TABLES).described},
        {GIVEN_ROWS: (1, -1, 0), SPREAD_TABLES: Tables(TABLES).described},
        {GIVEN_ROWS: (1, "1", 0), SPREAD_TABLES: Tables(TABLES).described},
        {SPREAD_TABLES: (("a", 1),)},
    ],
    ids=str,
)
def test_orders_that_bring_rows_which_make_no_sense(plan: Any) -> None:
    with pytest.raises(ValueError, match=r"rows of|more rows|make no sense"):
        rows_given(LoadShard(0, plan, (), (), 1))


@each_row(
    ("table", "parts"),
    [
        (3, (Part(0, 1, "raw", 24, 0),)),
        (0, ()),
        (0, (Part(0, 1, "raw", 23, 0),)),
        (0, (Part(0, 1001, "raw", 1001 * 24, 0),)),
    ],
)
def test_stored_rows_of_no_table(table: int, parts: Any) -> None:
    with pytest.raises(RemoteProtocolError, match="no rows of table"):
        CollectedRows(Tables(TABLES), [1]).sink(StoredRows(1, table, 0, parts))
