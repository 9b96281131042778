"""The links benchmark: its namespaces, and what it makes of the workers' lines."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from aiops.errors import UsageError
from benchmarks import links
from benchmarks.links import Counters, Options
from tests.rows import each_row


def test_exchanges_are_counted_by_what_the_links_have_moved() -> None:
    early, late = Counters(10.0, 500, 3.0, 2.0), Counters(14.0, 8_500, 6.0, 7.0)
    assert links.figures(early, late, 250) == {
        "per_second": 4.0,
        "bytes_per_second": 1_000.0,
        "seconds": 4.0,
        "busy": 3 / 8,
    }


@each_row("text", ["1", "gbit", "1 gbit", "1MB/s", "-1gbit"])
def test_a_rate_is_written_as_tc_does(text: str) -> None:
    with pytest.raises(UsageError, match="write it as tc does"):
        links.link_rate(text)
    assert links.link_rate("2.5gbit") == 312_500_000


@each_row("wrong", [{"workers": 0}, {"servers": (0,)}, {"size": 4097}])
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        links.run(Options(**wrong))


def test_what_a_report_says() -> None:
    row = {"per_second": 0.5, "bytes_per_second": 1e8, "of_link": 0.8, "busy": 0.9, "x": 1.9}
    report = {
        "options": {"size": 1 << 28, "workers": 8, "rate": "1gbit"},
        "rows": [{**row, "servers": 2}],
    }
    assert list(links.notes(report)) == ["2 servers: 1.90 times one (asked: 1.8)"]
    [cell] = links.cells(report)
    assert (cell.where, cell.median) == ("256 MiB, 2 servers of 1gbit", 0.8)
    assert links.table(report).row_count == 1


@pytest.mark.skipif(links.missing() is not None, reason=str(links.missing()))
def test_namespaces_are_made_and_removed() -> None:
    def show(*words: str) -> Any:
        return json.loads(subprocess.run(words, check=True, capture_output=True).stdout or b"[]")

    def left(hosts: list[str]) -> set[str]:
        return {each["name"] for each in show("ip", "-json", "netns", "list")} & set(hosts)

    with links.network(2, "8mbit") as hosts:
        assert len(hosts) == 3
        for number, host in enumerate(hosts, 1):
            [device] = show("ip", "-json", "-n", host, "addr", "show", "dev", "eth0")
            assert device["addr_info"][0]["local"] == f"10.77.0.{number}"
            [queue] = show("tc", "-json", "-n", host, "qdisc", "show", "dev", "eth0", "root")
            if number <= 2:
                assert (queue["kind"], queue["options"]["rate"]) == ("tbf", 1_000_000)
            else:
                assert queue["kind"] != "tbf"
        assert len(left(hosts)) == 3
        assert Counters.now(hosts[:-1]).idle > 0
    assert not left(hosts)
    with pytest.raises(KeyError), links.network(1, "8mbit") as hosts:
        raise KeyError
    assert not left(hosts)
