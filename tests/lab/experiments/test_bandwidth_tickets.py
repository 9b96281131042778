"""Mini-batches that several processes share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiops.lab.experiments.bandwidth.tickets import Tickets


def test_every_ticket_is_drawn_once(tmp_path: Path) -> None:
    def draw(_worker: int) -> int:
        with Tickets(tmp_path / "tickets", 500) as tickets:
            drawn = 0
            while tickets.draw():
                drawn += 1
            return drawn

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(draw, range(4))) == 500
    with Tickets(tmp_path / "tickets", 500) as late:
        assert not late.draw()
