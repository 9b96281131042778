"""The size of each room: files and lines may only go down.

A room that grows says so here, in the commit that lets it grow, and why in that commit's message.
"""

from __future__ import annotations

from pathlib import Path

from tests.rows import each_row

ROOT = Path(__file__).parents[1] / "aiops"

# room: the most files, the most lines
SIZES = {
    "access": (5, 705),
    "algorithms": (30, 4350),
    "averaging": (4, 519),
    "bandwidth": (9, 2150),
    "cli": (41, 6960),
    "client": (87, 19640),
    "codecs": (14, 3075),
    "compiled": (2, 58),
    "common": (18, 1441),
    "dashboard": (6, 850),
    "durable": (15, 3895),
    "engine": (42, 9850),
    "data": (6, 1015),
    "errors": (1, 240),
    "filters": (12, 2130),
    "kernels": (34, 6413),
    "lab": (147, 24330),
    "launch": (10, 2170),
    "metrics": (9, 1180),
    "model": (10, 1788),
    "net": (39, 6030),
    "ray": (15, 3025),
    "server": (1, 34),
    "serving": (64, 15000),
    "shards": (24, 5510),
    "sim": (38, 7060),
    "state": (10, 2350),
    "store": (21, 5100),
    "testing": (1, 241),
    "tracing": (4, 740),
    "trackers": (6, 398),
    "wire": (21, 4225),
}

SLACK = 1.02
"""A room may be this much larger than it was last written down, so that a comment costs nothing."""


def measured(room: str) -> tuple[int, int]:
    """Return the files and lines of a room."""
    path = ROOT / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return len(files), sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


@each_row("room", SIZES)
def test_a_room_does_not_grow(room: str) -> None:
    files, lines = measured(room)
    most_files, most_lines = SIZES[room]
    assert files <= most_files
    assert lines <= SLACK * most_lines


def test_every_room_is_measured() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.suffix == ".py"}
    rooms |= {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert rooms - {"__init__", "__main__", "_version"} == set(SIZES)
