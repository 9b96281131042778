"""``aiops relay`` as a process: on loopback, and between network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiops.averaging.relay import Claim
from aiops.cli.relay import relay
from aiops.errors import UsageError
from aiops.wire.connection import Connection
from aiops.wire.messages import PROTOCOL, Message, Prove
from aiops.wire.ring_messages import RelayHello
from aiops.wire.ring_proofs import relay_proof, ring_name, ring_token
from tests.support import PATIENCE, Process

TOKEN = "shared"
STARTS = 2 * PATIENCE
"""Seconds: on a processor that twelve others share, five processes that start have taken 45."""


@contextlib.contextmanager
def relaying(*flags: str, **env: str) -> Iterator[tuple[Process, int]]:
    process = Process("-m", "aiops", "relay", "--port", "0", *flags, env=env)
    try:
        yield process, int(process.line().rpartition(":")[2])
    finally:
        process.kill()


def end_of(port: int, claim: Claim) -> socket.socket:
    """One end of a connection, up to its proof."""
    sock, wire = socket.create_connection(("127.0.0.1", port), PATIENCE), Connection("client")
    hello = RelayHello(0, PROTOCOL, *claim, b"n" * 16)
    sock.sendall(b"".join(wire.send(hello)))
    challenge: Any = received(sock, wire)
    mine = relay_proof(ring_token(TOKEN, claim.ring), "client", hello, challenge.nonce)
    sock.sendall(b"".join(wire.send(Prove(0, mine))))
    return sock


def received(sock: socket.socket, wire: Connection) -> Message:
    while True:
        count = sock.recv_into(wire.next_buffer())
        assert count, "the relay closed the connection"
        for message, _sink in wire.received(count):
            return message


def test_a_receiver_that_is_slow_slows_its_sender_and_costs_the_relay_no_memory() -> None:
    """The relay has a buffer, and the kernel its own; the rest stays with the sender."""
    with relaying(AIOPS_RELAY_TOKEN=TOKEN) as (process, port):
        claim = Claim(ring_name(b"s" * 32, 1), 0, True)
        with end_of(port, claim) as sender, end_of(port, claim.other) as receiver:
            for sock in (sender, receiver):  # relay_ready, and nothing behind it
                head = sock.recv(5, socket.MSG_WAITALL)
                sock.recv(int.from_bytes(head[1:], "big"), socket.MSG_WAITALL)
            sender.setblocking(False)
            data, sent = bytes(1 << 20), 0
            while sent < 256 << 20 and select.select([], [sender], [], 0.5)[1]:
                sent += sender.send(data)
            assert sent < 64 << 20
            got = 0
            while got < sent:
                got += len(receiver.recv(1 << 20))
            assert got == sent
        resident = Path(f"/proc/{process.popen.pid}/status")
        if resident.exists():
            [peak] = [n for n in resident.read_text().splitlines() if n.startswith("VmHWM")]
            assert int(peak.split()[1]) < 256 << 10  # KiB: imports, mostly
        process.signal(signal.SIGTERM)
        code, _out, err = process.end()
        assert code == 0
        assert f"1 pairs, {sent} bytes passed on" in err


def test_it_refuses_to_serve_others_without_a_token() -> None:
    with pytest.raises(UsageError, match="AIOPS_RELAY_TOKEN"):
        relay(host="0.0.0.0", port=0)


WORKER = """
import json, select, sys
import numpy as np
import aiops.client

params = {"w": np.full(50_000, float(sys.argv[2]), np.float32)}
with aiops.client.ModelAverager(sys.argv[1], params, timeout=60) as averager:
    whole, told = 0, False
    while not select.select([sys.stdin], [], [], 0)[0]:  # others may need rounds with this one
        with averager.step():
            params["w"] += 1
        whole += averager.average() == 3
        if whole == 3 and not told:
            stats, told = averager.stats, True
            print(json.dumps([stats.rounds, stats.relayed, str(stats.last_error)]), flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=PATIENCE)


@contextlib.contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """Three hosts: two that the third one reaches, and that do not reach each other."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need iproute2 and root")
    names = {letter: f"aiops-{os.getpid()}-{letter}" for letter in "abc"}
    try:
        ip("netns", "add", names["c"])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        for number, letter in enumerate("ab", 1):
            here, there = f"aps{os.getpid()}{letter}"[-15:], f"apc{os.getpid()}{letter}"[-15:]
            ip("netns", "add", names[letter])
            ip("link", "add", here, "type", "veth", "peer", "name", there)
            for link, name, last in ((here, letter, 2), (there, "c", 1)):
                ip("link", "set", link, "netns", names[name])
                ip("-n", names[name], "addr", "add", f"10.77.{number}.{last}/24", "dev", link)
                ip("-n", names[name], "link", "set", link, "up")
            # What goes to the other one is dropped at the third, which forwards nothing.
            ip("-n", names[letter], "route", "add", "default", "via", f"10.77.{number}.1")
        for name in names.values():
            ip("-n", name, "link", "set", "lo", "up")
        forwards = ["sysctl", "-qw", "net.ipv4.ip_forward=0"]
        ip("netns", "exec", names["c"], *forwards)
        yield names
    finally:
        for name in names.values():
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                ip("netns", "del", name)


@pytest.mark.timeout(4 * STARTS)
def test_workers_that_cannot_reach_each_other_average_all_the_same() -> None:
    """Two of three workers have no route to each other; both reach the third, and the relay."""
    with namespaces() as names, contextlib.ExitStack() as stack:
        env = {**os.environ, "AIOPS_TOKEN": "run's", "AIOPS_RELAY_TOKEN": TOKEN}

        def started(letter: str, *words: str) -> subprocess.Popen[str]:
            command = ["ip", "netns", "exec", names[letter], sys.executable, *words]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = subprocess.Popen(command, text=True, env=env, **pipes)
            stack.callback(process.communicate, timeout=PATIENCE)
            stack.callback(process.kill)
            return process

        def line(process: subprocess.Popen[str]) -> str:
            assert process.stdout is not None
            said = select.select([process.stdout], [], [], STARTS)[0] and process.stdout.readline()
            assert said, f"{process.args!r} says nothing, and has ended with {process.poll()}"
            return said

        everywhere = ("--host", "0.0.0.0", "--port", "7172")
        first = started("c", "-m", "aiops", "relay", *everywhere)
        server = started(
            *("c", "-m", "aiops.server", "--host", "0.0.0.0", "--port", "7171"),
            *("--policy", "average", "--set", "interval=0.05", "--set", "grace=3"),
            *("--relay", "10.77.1.1:7172", "--log-level", "warning"),
        )
        assert line(first).startswith("0.0.0.0:")
        assert line(server).startswith("aiops://")
        hosts = {"a": "10.77.1.1", "b": "10.77.2.1", "c": "10.77.1.1"}
        workers = {
            letter: started(letter, "-c", WORKER, f"aiops://{host}:7171", str(n))
            for n, (letter, host) in enumerate(hosts.items())
        }
        found = {letter: json.loads(line(worker)) for letter, worker in workers.items()}
        rounds, relayed, _errors = zip(*found.values(), strict=True)
        assert min(rounds) >= 3
        assert min(relayed[:2]) >= 3, found
        assert relayed[2] < relayed[0], found
