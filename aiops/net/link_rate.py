"""Read how fast the network interface of an address is, where the system knows that.

Linux has the speed of a physical interface, and of bonds and bridges of such, in
``/sys/class/net/NAME/speed``. Most virtual interfaces (of containers, clouds, tunnels) have none.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

from aiops.common import urls

_NET, _IPV6 = Path("/sys/class/net"), Path("/proc/net/if_inet6")
_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_MEGABIT = 1_000_000 // 8


def link_rate(host: str, net: Path = _NET) -> int | None:
    """Return the bytes per second that the link of a listener carries in each direction.

    Of a listener on all addresses it is that of the fastest link. None: the system does not know,
    or there is no link, as on loopback.

    ``host``: the address that it listens on. ``net``: the folder of interfaces.
    """
    if urls.is_loopback(host):
        return None
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).is_unspecified:
            return max((rate for name in _names(net) if (rate := _rate(net / name))), default=None)
    with contextlib.suppress(OSError):
        own = str(socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)[0][4][0])
        name = next((name for name in _names(net) if own in _addresses(name)), None)
        return None if name is None else _rate(net / name)
    return None


def _names(net: Path) -> list[str]:
    try:
        return sorted(folder.name for folder in net.iterdir() if folder.name != "lo")
    except OSError:  # not Linux
        return []


def _rate(folder: Path) -> int | None:
    """Return an interface's bytes per second; None: it says none."""
    try:
        megabits = int((folder / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits * _MEGABIT if megabits > 0 else None


def _addresses(name: str) -> Iterator[str]:
    """Yield the addresses of an interface."""
    with contextlib.suppress(OSError, ImportError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            request = struct.pack("256s", name.encode()[:15])
            answer = fcntl.ioctl(sock, _GET_ADDRESS, request)
            yield socket.inet_ntoa(answer[20:24])
    with contextlib.suppress(OSError):
        for line in _IPV6.read_text().splitlines():
            address, *_, own = line.split()
            if own == name:
                yield str(ipaddress.IPv6Address(bytes.fromhex(address)))
