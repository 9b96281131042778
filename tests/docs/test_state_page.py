"""docs/state.md states what the code does."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from aiops.state import directory, frames, snapshot_file
from aiops.state.blocks import GENERATION, IDENTITY, MAX_BLOCK, SNAPSHOT
from aiops.state.plain import DTYPES
from aiops.state.row_kinds import FIELDS, RowKind
from docs._tools.state import examples
from docs._tools.state.__main__ import main
from docs._tools.state.page import BLOCKS, MEANINGS, page
from tests.state import foreign

PATH = Path(__file__).parents[2] / "docs" / "state.md"
PAGE = PATH.read_text(encoding="utf-8")


def test_it_is_up_to_date() -> None:
    assert page(PAGE) == PAGE, "run `make docs`"


def test_the_command_writes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks = re.compile(r"(<!-- (\w+): generated -->\n).*?(<!-- end of \2 -->)", re.DOTALL)
    bare = marks.sub(r"\1\3", PAGE)
    assert len(marks.findall(PAGE)) == len(BLOCKS)
    (tmp_path / "state.md").write_text(bare, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["state", str(tmp_path / "state.md")])
    main()
    assert (tmp_path / "state.md").read_text(encoding="utf-8") == PAGE


def test_every_kind_has_a_meaning() -> None:
    assert set(MEANINGS) == set(RowKind) == set(FIELDS)


def test_the_numbers_on_it() -> None:
    """Those in the prose, which nothing generates."""
    assert (frames.HEAD, frames.FRAME, frames.MAX_RUN) == (64, 48, 16)
    assert (snapshot_file.PAGE, snapshot_file.CHECKED) == (4096, 1 << 20)
    assert MAX_BLOCK == 1 << 28
    assert directory.MAX_HISTORY == 64
    assert frames.UNKNOWN == (1 << 32) - 1
    assert {MAGIC[:-1].decode() for MAGIC in (SNAPSHOT, IDENTITY, GENERATION)} == {
        f"aiops{two}" for two in ("SS", "ID", "GN")
    }
    for text in ("aiopsSS", "aiopsID", "aiopsGN", "aiopsJL", "aiopsEND", "snapshot-R", "journal-R"):
        assert text in PAGE
    for name in DTYPES:
        assert name.strip("0123456789").removesuffix("int") in PAGE or name in PAGE


def hex_of(block: str) -> bytes:
    """All lines of a block that are nothing but hex."""
    lines = PAGE.partition(f"<!-- {block}: generated -->")[2].partition("<!-- end")[0].splitlines()
    return bytes.fromhex("".join(x for x in lines if re.fullmatch(r"(?:[0-9a-f]{2})+", x)))


def test_a_reader_of_the_page_reads_its_examples() -> None:
    identity, end = foreign.block(hex_of("identity"), b"aiopsID\n")
    assert (identity["run"], end) == ("8c2f", len(hex_of("identity")))
    found, torn = foreign.segment(hex_of("segment"))
    assert [row.number for row in found] == [1, 2, 3]
    assert not torn
    assert hex_of("segment") == examples.files()["journal-" + "1".zfill(20)]
    header, _end = foreign.block(hex_of("snapshot"), b"aiopsSS\n")
    assert header["row"] == 3
