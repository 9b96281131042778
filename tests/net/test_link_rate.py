"""The speed of a link, as far as the system knows it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from aiops.net import link_rate as module
from aiops.net.link_rate import link_rate


@pytest.fixture
def net(tmp_path: Path) -> Path:
    """A folder of interfaces: some that say their speed, in Mbit/s, and some that do not."""
    for name, speed in {
        "eth0": "1000",
        "eth1": "10000",
        "veth": "-1",
        "lo": "7",
        "tun": "",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "speed").write_text(f"{speed}\n")
    (tmp_path / "down").mkdir()
    return tmp_path


def test_loopback_has_no_link(net: Path) -> None:
    assert [link_rate(host, net) for host in ("127.0.0.1", "::1", "localhost")] == [None] * 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_of_all_addresses_the_fastest_link_counts(host: str, net: Path) -> None:
    assert link_rate(host, net) == 1_250_000_000


@pytest.mark.parametrize(
    ("host", "rate"),
    [("10.0.0.1", 125_000_000), ("10.0.0.3", None), ("10.9.9.9", None), ("fd00::1", 125_000_000)],
)
def test_of_an_address_its_interface_counts(
    host: str, rate: int | None, net: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has = {"eth0": ["10.0.0.1", "fd00::1"], "eth1": ["10.0.0.2"], "veth": ["10.0.0.3"]}
    monkeypatch.setattr(module, "_addresses", lambda name: iter(has.get(name, [])))
    assert link_rate(host, net) == rate


def test_a_name_or_another_system_tells_nothing(tmp_path: Path) -> None:
    assert link_rate("a.example", tmp_path) is None
    assert link_rate("0.0.0.0", tmp_path / "none") is None


def test_the_addresses_of_a_real_interface() -> None:
    names = [name for _number, name in socket.if_nameindex()]
    assert "127.0.0.1" in [address for name in names for address in module._addresses(name)]
    assert list(module._addresses("no such thing")) == []
