"""``aiops state``: what it prints of whole, torn and damaged directories, and what it refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import aiops
from aiops.cli.replay import replay
from aiops.cli.state import app
from aiops.common import formatting
from aiops.errors import AiopsError, DamagedState, UsageError
from aiops.serving.safetensors_io import read_model, read_tables
from aiops.state.directory import GenerationFile, StateIdentity, journal_name, snapshot_name
from aiops.state.frames import SegmentHead, frame
from aiops.state.plain import pack
from aiops.state.row_kinds import FIELDS, RowKind
from aiops.state.snapshot_file import SnapshotHeader, SnapshotPlan
from docs._tools.state import examples
from tests.peers import eventually
from tests.rows import each_row
from tests.state.golden import FOLDER
from tests.support import ServerThread

SNAPSHOT, FIRST, LAST = snapshot_name(3), journal_name(1), journal_name(4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A state directory: rows 1 to 6, and the snapshot of row 3."""
    made = tmp_path / "state"
    made.mkdir()
    for name, data in examples.files().items():
        (made / name).write_bytes(data)
    return made


def run(*flags: object) -> Any:
    result = CliRunner().invoke(app, [*map(str, flags)])
    if isinstance(result.exception, AiopsError):
        raise result.exception
    return result


def report(command: str, folder: Path, status: int = 0) -> dict[str, Any]:
    result = run(command, folder, "--json")
    assert result.exit_code == status
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def write_snapshot(folder: Path, header: dict[str, Any], arrays: dict[str, Any]) -> None:
    plan = SnapshotPlan(SnapshotHeader(**(examples.HEADER.plain() | header)), arrays)
    data = b"".join(part for _at, buffers in plan.pieces() for part in buffers)
    (folder / snapshot_name(header["row"])).write_bytes(data)


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_a_whole_directory(folder: Path, command: str) -> None:
    found = report(command, folder)
    assert (found["run"], found["generation"], found["whole"]) == ("8c2f", 2, True)
    assert [(f["name"], f["first"], f["last"]) for f in found["files"]] == [
        (SNAPSHOT, None, 3),
        (FIRST, 1, 3),
        (LAST, 4, 6),
    ]
    assert found["state"] == {"snapshot": 3, "row": 6, "versions": [0], "why": "", "void": []}
    text = run(command, folder).stdout
    assert "run 8c2f, generation 2" in text
    assert "A server resumes with row 6: the snapshot (version 0) and the 3 rows since." in text


def test_files_that_are_not_of_the_state(folder: Path) -> None:
    for name in ("spare-1", snapshot_name(9) + ".part", "notes.txt"):
        (folder / name).write_bytes(b"?")
    found = report("verify", folder)
    assert (found["spares"], found["foreign"]) == (1, ["notes.txt"])
    assert found["incomplete"] == [snapshot_name(9) + ".part"]
    assert "notes.txt is not a part of the state" in run("ls", folder).stdout


def test_a_torn_end(folder: Path) -> None:
    data = (folder / LAST).read_bytes()
    at = data.index(examples.ROWS[5][4], 64 + 100)
    (folder / LAST).write_bytes(data[:at])
    found = report("verify", folder)
    assert found["files"][-1]["last"] == found["state"]["row"] == 5
    assert found["files"][-1]["torn"] > 0
    assert "torn: " in run("verify", folder).stdout


def test_a_bad_row_that_was_not_known_to_be_synced(folder: Path) -> None:
    """After a loss of power any of the last rows may be missing."""
    flip(folder / LAST, 64 + 20)
    found = report("verify", folder)
    assert found["files"][-1]["torn"] > 0
    assert found["state"]["row"] == 3


def test_a_bad_row_that_had_been_synced(folder: Path) -> None:
    (folder / LAST).write_bytes(examples.segment(4, 7, 2, 1, synced=4))
    flip(folder / LAST, 64 + 20)
    found = report("verify", folder, status=1)
    assert "damaged at row 4 (byte 64), which had been synced when row" in found["state"]["why"]
    assert found["state"]["row"] == 3


def test_a_damaged_journal_before_the_last_segment(folder: Path) -> None:
    (folder / SNAPSHOT).unlink()
    flip(folder / FIRST, 64 + 20)
    found = report("ls", folder, status=0)
    assert not found["whole"]
    assert "row 1 (byte 64), which had been synced when row" in found["state"]["why"]
    result = run("verify", folder)
    assert result.exit_code == 1
    assert "A server cannot resume with this state: " in result.stdout


def test_rows_that_are_lost_before_the_last_segment(folder: Path) -> None:
    """After a loss of power: what follows them is void."""
    (folder / SNAPSHOT).unlink()
    (folder / LAST).write_bytes(examples.segment(4, 7, 2, 1, synced=0))
    flip(folder / FIRST, (folder / FIRST).read_bytes().index(examples.VALUES.tobytes()))
    found = report("verify", folder)
    assert (found["state"]["row"], found["state"]["void"]) == (1, [LAST])
    assert f"{LAST} is void" in run("verify", folder).stdout


def journal_with_a_gap(folder: Path, unjournalled: int) -> None:
    """Have the journal end with row 3, and another begin later, behind a snapshot."""
    first = 4 + unjournalled
    (folder / LAST).unlink()
    (folder / FIRST).write_bytes((folder / FIRST).read_bytes() + bytes(64))
    write_snapshot(folder, {"row": first - 1}, {"params": np.zeros(12, np.uint8)})
    head = SegmentHead(first, 2, "8c2f", 1).pack()
    row = frame(first, RowKind.TICK, 2.5, 0, pack([]), 0, 0, salt=1, unsynced=1)
    (folder / journal_name(first)).write_bytes(head + b"".join(row))


def test_rows_that_were_never_journalled_are_no_damage(folder: Path) -> None:
    """There was no room for them: a snapshot was taken later, and the journal begun again."""
    journal_with_a_gap(folder, 5)
    found = report("verify", folder)
    assert found["whole"]
    assert [each["gap"] for each in found["files"]] == [None, None, [4, 8], None]
    assert (found["state"]["snapshot"], found["state"]["row"]) == (8, 9)
    said = run("verify", folder).stdout
    assert "the rows from 4 to 8" in said
    assert [
        json.loads(each)["number"] for each in run("show", folder, "--json").stdout.split("\n")[:-1]
    ] == [1, 2, 3, 9]
    flip(folder / FIRST, 64 + 48 + 8)
    assert not report("verify", folder, status=1)["whole"], "a row before them is damaged"


def test_rows_that_no_snapshot_has_are_missing(folder: Path) -> None:
    journal_with_a_gap(folder, 5)
    (folder / snapshot_name(8)).unlink()
    found = report("verify", folder, status=1)
    assert "damaged at row 4" in found["state"]["why"]


def test_a_segment_whose_head_never_reached_the_disk(folder: Path) -> None:
    data = (folder / LAST).read_bytes()
    (folder / LAST).write_bytes(bytes(64) + data[64:])
    found = report("verify", folder)
    assert found["state"]["row"] == 3
    assert found["files"][-1]["torn"]


def test_a_damaged_payload_is_for_verify_to_find(folder: Path) -> None:
    at = (folder / FIRST).read_bytes().index(examples.VALUES.tobytes())
    flip(folder / FIRST, at)
    assert report("ls", folder)["whole"]
    found = report("verify", folder, status=1)
    assert "is damaged at row 2" in found["files"][1]["why"]
    assert found["state"]["row"] == 6, "the snapshot is whole, so this segment is not needed"


def test_a_damaged_snapshot_costs_time_and_nothing_else(folder: Path) -> None:
    flip(folder / SNAPSHOT, 4096)
    assert report("ls", folder)["whole"]
    found = report("verify", folder, status=1)
    assert "bytes 4,096 to 12,288 are not those that were written" in found["files"][0]["why"]
    assert found["state"] == {"snapshot": None, "row": 6, "versions": None, "why": "", "void": []}
    assert "from the first row on" in run("verify", folder).stdout


def test_nothing_leads_to_a_state(folder: Path) -> None:
    (folder / FIRST).unlink()
    flip(folder / SNAPSHOT, 20)
    found = report("ls", folder)
    assert "the rows from 1 to 3 are missing" in found["state"]["why"]
    (folder / LAST).unlink()
    assert "no snapshot is whole" in report("verify", folder, status=1)["state"]["why"]


def test_files_of_another_run(folder: Path) -> None:
    write_snapshot(folder, {"row": 5, "run": "beef"}, {})
    (folder / journal_name(7)).write_bytes(SegmentHead(7, 2, "beef", 1).pack())
    found = report("verify", folder, status=1)
    assert "is of run beef, and not of run 8c2f" in found["files"][1]["why"]
    assert "is of run beef, and not of run 8c2f" in found["files"][-1]["why"]


def test_shards_are_named(folder: Path) -> None:
    (folder / "identity").write_bytes(StateIdentity("8c2f", 1, 3, 0.0).pack())
    (folder / "generation").write_bytes(GenerationFile(65_537).pack())
    assert "run 8c2f, shard 1 of 3, generation 65537" in run("ls", folder).stdout


def test_the_folders_of_all_shards(folder: Path, tmp_path: Path) -> None:
    for shard in range(2):
        copy = shutil.copytree(folder, tmp_path / "all" / f"shard-{shard}")
        (copy / "identity").write_bytes(StateIdentity("8c2f", shard, 2, 0.0).pack())
    lines = run("verify", tmp_path / "all", "--json").stdout.splitlines()
    assert [json.loads(line)["shard"] for line in lines] == [0, 1]
    flip(copy / SNAPSHOT, 5000)
    done = run("verify", tmp_path / "all")
    assert done.exit_code == 1
    assert "shard 0 of 2" in done.stdout
    assert "shard 1 of 2" in done.stdout
    with pytest.raises(UsageError, match=r"give one of .*shard-0, .*shard-1"):
        run("show", tmp_path / "all")


@each_row(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "is not the --state of a server"),
        (lambda path: path.write_bytes(b""), "is neither the --state of a server nor a"),
    ],
)
def test_no_state(tmp_path: Path, make: Any, why: str) -> None:
    make(tmp_path / "other")
    with pytest.raises(UsageError, match=why):
        run("ls", tmp_path / "other")


def test_a_damaged_identity(folder: Path) -> None:
    flip(folder / "identity", 30)
    with pytest.raises(DamagedState, match="identity is damaged: the checksum"):
        run("ls", folder)
    (folder / "identity").unlink()
    with pytest.raises(UsageError, match="identity: No such file"):
        run("ls", folder)


class TestShow:
    def test_rows(self, folder: Path) -> None:
        lines = [json.loads(line) for line in run("show", folder, "--json").stdout.splitlines()]
        assert [line["number"] for line in lines] == [1, 2, 3, 4, 5, 6]
        assert lines[4] == {
            "number": 5,
            "kind": "steady",
            "time": 1.5,
            "leased": True,
            "payload": 12,
            "text": "connection 7: push 1 at version 0, 12 B; has version 0",
            "fields": dict(zip(FIELDS[RowKind.STEADY], (*examples.STEADY, []), strict=True)),
        }
        text = run("show", folder, "--rows", 2).stdout
        assert "steady" in text
        assert "tick" in text
        assert "resumed" not in text

    @staticmethod
    def lines(path: Path, **codecs: Any) -> list[Any]:
        """Return the rows of three exchanges, as JSON says them."""
        settings = {"policy": "asgd", "state": path / "s", **codecs}
        with (
            ServerThread(**settings) as server,
            aiops.Worker(server.url, {"w": np.zeros(1 << 14, np.float32)}, name="anna") as worker,
        ):
            eventually(lambda: server.call(lambda s: s.warm), "what it compiles is there")
            for _ in range(3):
                worker.step({"w": np.ones(1 << 14, np.float32)})
        return [
            json.loads(line)
            for line in run("show", path / "s", "--json", "--rows", 99).stdout.splitlines()
        ]

    def test_what_rows_say(self, tmp_path: Path) -> None:
        """Messages are in the files as on the wire, which is not for people."""
        lines = self.lines(tmp_path, push_codec=["int8"])
        [hello] = [line["fields"]["hello"] for line in lines if line["kind"] == "joined"]
        assert (hello["kind"], hello["name"], hello["role"]) == ("hello", "anna", "worker")
        [joined] = [line["text"] for line in lines if line["kind"] == "joined"]
        assert joined.startswith(f"worker 'anna' (client {hello['client']}, connection 1")
        pushes = [
            line
            for line in lines
            if line["kind"] == "received" and line["fields"]["message"]["kind"] == "push"
        ]
        *others, steady = [line for line in lines if line["kind"] == "steady"]
        seqs = [line["fields"]["message"]["seq"] for line in pushes]
        assert seqs == [1, 2][: 2 - len(others)]  # the second, if the codec is compiled already
        assert (
            f"push 3 at version 2, {formatting.nbytes(steady['payload'])} (int8); has"
            in (steady["text"])
        )
        assert steady["fields"]["parts"] == [[0, 1 << 16, "int8", steady["payload"]]]
        for version, line in enumerate(pushes):
            assert line["text"].startswith("anna (connection 1): push id ")
            assert f"seq {version + 1}, " in line["text"]
            nbytes = formatting.nbytes(line["payload"])
            assert f"{nbytes} in 1 parts (int8), version {version}" in line["text"]
        [left] = [line["text"] for line in lines if line["kind"] == "left"]
        assert left == "anna (connection 1)"
        assert lines[0]["text"].startswith(f"run {lines[0]['fields']['run']}, policy asgd, lr 0.")
        shown = run("show", tmp_path / "s", "--rows", 99).stdout
        assert "seq 1, " in shown
        number = pushes[0]["number"]
        one = json.loads(run("show", tmp_path / "s", "--row", number).stdout)
        assert one["fields"]["message"]["parts"][0]["codec"] == "int8"

    def test_what_rows_of_coded_exchanges_say(self, tmp_path: Path) -> None:
        lines = self.lines(tmp_path, fetch_codec=["int8"])
        coded = [line for line in lines if line["kind"] == "coded"]
        assert coded
        assert coded[-1]["text"] == (
            f"anna (connection 1): push 3 at version 2, {formatting.nbytes(1 << 16)};"
            " has version 2, and fetches coded"
        )
        assert coded[-1]["fields"]["followed"] > 0

    def test_one_row(self, folder: Path) -> None:
        found = json.loads(run("show", folder, "--row", 1).stdout)
        assert (found["kind"], found["fields"]["policy"]) == ("begin", "asgd")
        for row in (0, 7):
            with pytest.raises(UsageError, match=f"has no row {row}"):
                run("show", folder, "--row", row)

    def test_a_snapshot(self, folder: Path) -> None:
        found = json.loads(run("show", folder, "--snapshot", 3, "--json").stdout)
        assert found["owners"]["sums"] == {"dtype": "int64", "items": [4]}
        assert [entry["name"] for entry in found["arrays"]] == ["params", "state/0/m"]
        with pytest.raises(UsageError, match="No such file"):
            run("show", folder, "--snapshot", 4)

    def test_values_that_json_lacks(self, folder: Path) -> None:
        owners = {"policy": {"a": {2, 1}, "b": (float("nan"), b"\xff"), "c": {(1, 2): 1 << 70}}}
        write_snapshot(folder, {"row": 4, "owners": owners}, {})
        found = json.loads(run("show", folder, "--snapshot", 4).stdout)
        assert found["owners"]["policy"] == {
            "a": [1, 2],
            "b": ["nan", "ff"],
            "c": {"(1, 2)": 1 << 70},
        }

    def test_two_questions(self, folder: Path) -> None:
        with pytest.raises(UsageError, match="ask one"):
            run("show", folder, "--row", 1, "--snapshot", 3)


class TestExport:
    def test_the_newest(self, folder: Path) -> None:
        out = folder.parent / "model.safetensors"
        found = json.loads(run("export", folder, "--out", out, "--json").stdout)
        assert found == {"out": str(out), "row": 3, "version": 0, "tensors": 1}
        np.testing.assert_array_equal(read_model(out)["w"], examples.VALUES)
        assert "version 0, at row 3, 1 tensors" in run("export", folder, "--out", out).stdout

    def test_another_one_than_the_newest(self, folder: Path) -> None:
        arrays = {"params": np.array([7, 8, 9], np.float32).view(np.uint8)}
        write_snapshot(folder, {"row": 5, "versions": [2]}, arrays)
        out = folder.parent / "model.safetensors"
        run("export", folder, "--out", out)
        assert read_model(out)["w"].tolist() == [7, 8, 9]
        run("export", folder, "--out", out, "--snapshot", 3)
        assert read_model(out)["w"].tolist() == [1, 2, 3]
        flip(folder / snapshot_name(5), 20)
        assert "at row 3" in run("export", folder, "--out", out).stdout

    @pytest.mark.parametrize(
        ("owners", "why"),
        [
            ({}, "the snapshot has no parameters"),
            ({"model": 3}, "the snapshot's model is damaged"),
            ({"model": [[["w", "float32", [4]]], []]}, "have 12 bytes, too few"),
            (
                {"model": [[["w", "float32", [3]]], [["words"]]]},
                "the snapshot's tables are damaged",
            ),
        ],
    )
    def test_what_cannot_be_exported(self, folder: Path, owners: Any, why: str) -> None:
        write_snapshot(folder, {"row": 5, "owners": owners}, {"params": np.zeros(12, np.uint8)})
        with pytest.raises(UsageError, match=why):
            run("export", folder, "--out", folder.parent / "model.safetensors")

    def test_damage_is_not_exported(self, folder: Path) -> None:
        flip(folder / SNAPSHOT, 4096)
        out = folder.parent / "model.safetensors"
        with pytest.raises(DamagedState, match="are not those that were written"):
            run("export", folder, "--out", out)
        assert not out.exists()
        shutil.rmtree(folder)
        folder.mkdir()
        (folder / FIRST).write_bytes(examples.files()[FIRST])
        with pytest.raises(UsageError, match="has no whole snapshot"):
            run("export", folder, "--out", out)


class TestExportAtARow:
    """The model as it was after any row that the snapshots and the journal lead to."""

    def train(self, folder: Path, steps: int) -> int:
        """Train; return the last row."""
        tables = {"words": aiops.Table(rows=20, width=2)}
        settings = {"policy": "asgd", "set": {"lr": 1.0}, "acks": "written", "state": folder}
        with ServerThread(**settings) as server:
            start = {"w": np.zeros(4, np.float32)}
            with aiops.Worker(server.url, start, tables=tables) as worker:
                for _ in range(steps):
                    worker.step(lambda params: {"w": np.ones(4, np.float32)})
                worker.push_rows("words", [3], np.ones((1, 2), np.float32))
        row: int = json.loads(run("ls", folder, "--json").stdout)["state"]["row"]
        return row

    def test_each_row(self, tmp_path: Path) -> None:
        state, out = tmp_path / "s", tmp_path / "model.safetensors"

        def exported(row: int) -> int:
            found = json.loads(run("export", state, "--out", out, "--at", row, "--json").stdout)
            assert read_model(out)["w"].tolist() == [-found["version"]] * 4
            version: int = found["version"]
            return version

        versions = [exported(row) for row in range(5, self.train(state, 3) + 1)]
        assert versions == sorted(versions)
        assert {0, 1, 2, 3} == set(versions)
        [(described, ids, _rows)] = read_tables(out)
        assert (described[0], ids.tolist()) == ("words", [3])
        last = self.train(state, 4)
        assert exported(last) == 7
        assert 3 <= exported(last - 3) <= 7

    def test_tables_of_a_snapshot_and_one_table_alone(self, tmp_path: Path) -> None:
        state, out, rows = tmp_path / "s", tmp_path / "m.safetensors", tmp_path / "words.npz"
        self.train(state, 1)
        self.train(state, 2)  # whose server has written a snapshot
        found = json.loads(run("export", state, "--out", out, "--json").stdout)
        assert found["tables"] == {"words": 1}
        [(_described, ids, values)] = read_tables(out)
        assert ids.tolist() == [3]
        run("export", state, "--out", out, "--at", found["row"])
        [(_described, _ids, replayed)] = read_tables(out)
        assert values.tobytes() == replayed.tobytes()
        for at in ([], ["--at", found["row"]]):
            said = run("export", state, "--out", rows, "--table", "words", *at).stdout
            assert "table 'words' at row" in said
            with np.load(rows) as file:
                assert file["ids"].tolist() == [3]
                assert file["rows"].tobytes() == values.tobytes()
        with pytest.raises(UsageError, match="no table 'word'; did you mean 'words'"):
            run("export", state, "--out", rows, "--table", "word")
        with pytest.raises(UsageError, match=r"to a \.npz file"):
            run("export", state, "--out", out, "--table", "words")

    def test_replay_runs_the_rows_again(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        state, found = tmp_path / "s", []
        self.train(state, 3)
        for kernels in ("numba", "numpy"):
            replay(state, None, kernels, as_json=True)
            found.append(json.loads(capsys.readouterr().out))
        first, second = found
        assert (first["version"], first["complete"], first["policy"]) == (3, True, "asgd")
        assert first["events"] > 8, "the journal is there from its first row on"
        assert first["sha256"] == second["sha256"]
        for _ in range(2):
            self.train(state, 2)
        replay(state, tmp_path / "model.safetensors", "auto", as_json=True)
        last = json.loads(capsys.readouterr().out)
        assert (last["version"], last["events"] > 3) == (7, True)
        assert read_model(tmp_path / "model.safetensors")["w"].tolist() == [-7.0] * 4

    def test_rows_that_there_are_not(self, tmp_path: Path) -> None:
        state, out = tmp_path / "s", tmp_path / "model.safetensors"
        self.train(state, 2)
        with pytest.raises(UsageError, match="ends at row"):
            run("export", state, "--out", out, "--at", 1000)
        with pytest.raises(UsageError, match="no model was defined at row 1"):
            run("export", state, "--out", out, "--at", 1)
        with pytest.raises(UsageError, match="without --snapshot"):
            run("export", state, "--out", out, "--at", 5, "--snapshot", 3)
        self.train(state, 2)
        with pytest.raises(UsageError, match="has no snapshot of row 2 or an earlier one"):
            run("export", state, "--out", out, "--at", 2)


class TestOneFile:
    """A checkpoint of the simulator, which is a snapshot without a directory."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        path = tmp_path / "run.ckpt"
        shutil.copyfile(FOLDER / "simulation" / "format-1", path)
        return path

    @pytest.mark.parametrize("command", ["ls", "verify"])
    def test_whole(self, path: Path, command: str) -> None:
        found = report(command, path)
        assert (found["kind"], found["row"], found["whole"]) == ("simulation", 22, True)
        assert found["arrays"] > 3
        said = run(command, path).stdout
        assert "turns" in said
        assert "numpy" in said

    def test_damaged(self, path: Path) -> None:
        flip(path, path.stat().st_size - 5000)
        assert report("ls", path)["whole"], "it reads header and footer only"
        found = report("verify", path, status=1)
        assert "are not those that were written" in found["why"]
        path.write_bytes(path.read_bytes()[:-1])
        assert not report("ls", path, status=0)["whole"]
        assert "is damaged" in run("verify", path).stdout

    def test_its_values_are_shown(self, path: Path) -> None:
        header = json.loads(run("show", path).stdout)
        assert header["settings"]["simulation"]["selection"] == "softmax:add=-0.5"
        with pytest.raises(UsageError, match="is one snapshot, without rows"):
            run("show", path, "--row", 1)

    def test_its_model_is_exported(self, path: Path, tmp_path: Path) -> None:
        assert run("export", path, "--out", tmp_path / "model.safetensors").exit_code == 0
        model = read_model(tmp_path / "model.safetensors")
        assert {name: array.shape for name, array in model.items()}["wide"] == (32, 20)
        with pytest.raises(UsageError, match="leave out --snapshot"):
            run("export", path, "--out", tmp_path / "x.safetensors", "--snapshot", 3)
