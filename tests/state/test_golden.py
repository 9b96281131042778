"""Files of every format are read for ever, by our reader and by one that knows the page alone."""

from __future__ import annotations

import ast
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiops.errors import DamagedState
from aiops.sim.turns.run import Run, digest
from aiops.state.blocks import FORMAT, reader
from aiops.state.directory import (
    GenerationFile,
    GenerationStart,
    StateIdentity,
    StateListing,
    journal_name,
)
from aiops.state.frames import SegmentScan
from aiops.state.journal_scan import JournalScan
from aiops.state.plain import pack
from aiops.state.row_kinds import row_fields
from aiops.state.snapshot_file import SnapshotFile
from docs._tools.state.examples import files
from tests.sim.turns.wide_task import WideTask
from tests.state import foreign
from tests.state.golden import FOLDER, simulations
from tests.state.test_frames import Row, flipped, rows, segment
from tests.state.test_plain import typed, values

FIRST = FOLDER / "format-1"
SNAPSHOT, ONE, FOUR = (
    "snapshot-" + "3".zfill(20),
    "journal-" + "1".zfill(20),
    ("journal-" + "4".zfill(20)),
)


def test_every_format_has_files() -> None:
    assert {path.name for path in FOLDER.glob("format-*")} == {
        f"format-{number}" for number in range(1, FORMAT + 1)
    }


def test_the_present_format_is_written_as_ever() -> None:
    folder = FOLDER / f"format-{FORMAT}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == files(), (
        "a change of the format is a new format; docs/state.md"
    )


class TestFirst:
    """Format 1: what is in the files is written out here, so that no change goes unseen."""

    def test_the_directory(self) -> None:
        found = StateListing(path.name for path in FIRST.iterdir())
        assert (found.snapshots, found.segments, found.foreign) == ((3,), (1, 4), ())
        assert found.segments_after(3) == (4,)

    def test_identity_and_generation(self) -> None:
        identity = StateIdentity.unpack((FIRST / "identity").read_bytes())
        assert identity == StateIdentity("8c2f", 0, 1, 1_700_000_000.0)
        generation = GenerationFile.unpack((FIRST / "generation").read_bytes())
        starts = GenerationStart(1, 0, ()), GenerationStart(2, 3, (0,))
        assert generation == GenerationFile(2, starts, secret=bytes(range(32)))

    def test_the_first_segment(self) -> None:
        scan = SegmentScan((FIRST / ONE).read_bytes(), ONE, first=1, until=4)
        begin, initialised, snapshot = scan
        assert (scan.head.generation, scan.head.run, scan.head.salt) == (1, "8c2f", 0x1A1A1A1A)
        assert row_fields(begin.kind, begin.row, ONE) == {
            "policy": "asgd",
            "settings": {"lr": 0.5},
            "options": {"max_model": 1 << 20},
            "run": "8c2f",
            "aiops": "0.3.0",
            "rule": "",
        }
        assert row_fields(initialised.kind, initialised.row, ONE) == {
            "tensors": [["w", "float32", [3], 0]],
            "tables": [],
        }
        assert bytes(initialised.payload) == struct.pack("<3f", 1, 2, 3)
        assert row_fields(snapshot.kind, snapshot.row, ONE) == {"number": 1}
        assert [each.time for each in (begin, initialised, snapshot)] == [0, 0.25, 0.25]

    def test_the_recycled_segment(self) -> None:
        scan = SegmentScan((FIRST / FOUR).read_bytes(), FOUR, first=4)
        resumed, steady, tick = scan
        assert (scan.row, scan.torn) == (7, 0)
        assert row_fields(resumed.kind, resumed.row, FOUR) == {"generation": 2}
        assert row_fields(steady.kind, steady.row, FOUR) == {
            "peer": 7,
            "id": 21,
            "seq": 1,
            "have": 0,
            "base": 0,
            "check": 0xC0FFEE,
            "parts": [],
        }
        assert (steady.flags, steady.time, steady.unsynced) == (1, 1.5, 2)
        assert bytes(steady.payload) == struct.pack("<3f", 2, 0, -2)
        assert row_fields(tick.kind, tick.row, FOUR) == {}

    def test_the_snapshot(self) -> None:
        data = (FIRST / SNAPSHOT).read_bytes()
        file = SnapshotFile(reader(data), len(data), SNAPSHOT)
        header = file.header
        assert (header.row, header.generation, header.run, header.versions) == (3, 1, "8c2f", [0])
        assert header.settings == {"policy": "asgd", "lr": 0.5}
        sums = header.owners["sums"]
        assert (sums.dtype, sums.tolist()) == (np.int64, [4])
        assert file.array("params").tobytes() == struct.pack("<3f", 1, 2, 3)
        assert file.array("state/0/m").tolist() == [[0.5], [0.25], [0]]
        file.verify()


class TestSimulation:
    """Checkpoints of the simulator of every format lead to the result of a run of today.

    Until a release has written format 1, a change of what the engine or the clients keep may write
    its file again: ``python -m tests.state.golden``.
    """

    @pytest.mark.parametrize("number", range(1, FORMAT + 1))
    def test_it_is_resumed(self, number: int) -> None:
        with Run(simulations.CASE, WideTask()) as run:
            run.dispatcher.run(simulations.ALL)
            expected = digest(run.dispatcher)
        path = FOLDER / "simulation" / f"format-{number}"
        with Run.load(path, WideTask(), simulations.CASE) as run:
            assert run.iteration == simulations.HALF
            run.dispatcher.run(simulations.ALL - simulations.HALF)
            assert digest(run.dispatcher) == expected

    def test_the_first_is_read_with_the_page_alone(self) -> None:
        header, arrays = foreign.snapshot((FOLDER / "simulation" / "format-1").read_bytes())
        assert (header["kind"], header["row"], header["run"]) == ("simulation", 22, "")
        assert header["settings"]["simulation"]["policy"] == "diloco"
        assert header["settings"]["task"]["examples"] == WideTask.examples
        owners = header["owners"]
        assert owners["dispatcher"]["iteration"] == 22
        assert len(owners["clients"]) == 3
        assert len(arrays["params"]) == WideTask.NBYTES
        assert owners["small"]["client/0/params"].shape == [WideTask.NBYTES]


class TestFromThePageAlone:
    """`tests/state/foreign.py` is written from docs/state.md."""

    def test_it_imports_nothing_of_ours(self) -> None:
        tree = ast.parse(Path(foreign.__file__).read_text(encoding="utf-8"))
        imported = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add((node.module or "").partition(".")[0])
        assert imported <= set(sys.stdlib_module_names)

    def test_it_reads_the_directory(self) -> None:
        held = files()
        identity, _end = foreign.block(held["identity"], b"aiopsID\n")
        assert identity["run"] == "8c2f"
        generation, _end = foreign.block(held["generation"], b"aiopsGN\n")
        assert generation == {
            "generation": 2,
            "starts": [[1, 0, []], [2, 3, [0]]],
            "secret": bytes(range(32)),
        }
        header, arrays = foreign.snapshot(held[SNAPSHOT])
        assert arrays["params"] == struct.pack("<3f", 1, 2, 3)
        assert arrays["state/0/m"] == struct.pack("<3d", 0.5, 0.25, 0)
        small = header["owners"]["sums"]
        assert small == foreign.Small("int64", [1], struct.pack("<q", 4))
        found, torn = foreign.segment(held[ONE], until=4)
        assert [row.kind for row in found] == [1, 3, 12]
        assert (foreign.value(found[0].row)[0], torn) == ("asgd", False)
        found, torn = foreign.segment(held[FOUR])
        assert [row.number for row in found] == [4, 5, 6]
        assert struct.unpack("<IQQqQI", found[1].row) == (7, 21, 1, 0, 0, 0xC0FFEE)
        assert not torn

    @given(values)
    def test_it_reads_plain_values(self, value: Any) -> None:
        assert typed(foreign.value(pack(value))) == typed(value)

    @given(st.lists(rows, min_size=1, max_size=5), st.data())
    def test_it_judges_damage_as_we_do(self, written: list[Row], data: st.DataObject) -> None:
        marks = {
            number: data.draw(st.integers(0, number - 1))
            for number in data.draw(st.sets(st.integers(1, len(written))))
        }
        whole, ends = segment(written, marks=marks)
        old, _ends = segment(written, 1, 99, {len(written): 0})
        whole += old[data.draw(st.integers(8, len(old))) // 8 * 8 :]
        bad = flipped(whole, data.draw(st.integers(512, 8 * ends[-1] - 1)))
        bad = bad[: data.draw(st.sampled_from([len(bad), len(bad) // 16 * 8 + 64]))]
        later = data.draw(st.lists(rows, max_size=2))
        mark = data.draw(st.integers(0, len(written)))
        after, _ends = segment(later, len(written) + 1, 7, {len(written) + len(later): mark})
        if data.draw(st.booleans()):
            after = flipped(after, data.draw(st.integers(0, 8 * len(after) - 1)))
        listing = [(1, bad), (len(written) + 1, after)][: data.draw(st.integers(1, 2))]
        files = {journal_name(first): each for first, each in listing}
        found = StateListing(files)
        scan = JournalScan(files.__getitem__, found, 0, found.segments, ("8c2f", 0, 1))
        try:
            ours = list(scan)
        except DamagedState:
            with pytest.raises(foreign.Damaged):
                foreign.journal(listing)
            return
        theirs, void = foreign.journal(listing)
        assert [(r.number, r.row, r.payload) for r in theirs] == [
            (f.number, f.row, bytes(f.payload)) for f in ours
        ]
        assert void == len(scan.void)
