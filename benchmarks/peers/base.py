"""The contract of all peers of the exchange benchmark: the work, the interface and the check.

One *cycle*: a worker pushes a float32 gradient of S bytes, the server applies plain SGD
(``theta -= lr * g``), and the worker ends with the new parameters in its own array. With the
setting ``views`` it may read them instead where the server keeps them, in another array each
time; they stay as they are until its next cycle.

A push takes effect whole: the update begins when all of the gradient is there, so that a worker
that dies half way leaves no trace. A fetch need not be: a peer may update in place while it still
sends to another worker, which is quicker and lets versions mix; the report tells who did. With the
setting ``whole`` the peers too deliver one version.

The gradient is made of the integers 1..7 and the learning rate is a power of two, so float32 sums
are exact and the parameters after n cycles are known to the last bit: a peer that loses, doubles,
reorders or mixes up any part of an update is found out.

A peer is a module of this package with

* ``SETTINGS``: its settings, and the values that were fastest when they were tried;
* ``ENVIRONMENT``: variables for its processes, chosen likewise;
* ``missing()``: why it cannot run here, or None;
* ``Server(job)`` and ``Worker(job, address, index)``: see the protocols below.

There are two groups of them, which are compared each with its own: those of `TCP`, over loopback,
and those of `SAME_HOST`, which share memory.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.float32]
Setting: TypeAlias = int | bool | str
Times: TypeAlias = Sequence[tuple[float, float]]

LEARNING_RATE = 2.0**-10
_PERIOD = 7
"""The gradient repeats 1..7: no power of two is a multiple of 7, so no shifted block fits."""
MAX_CYCLES = 2**24 // _PERIOD
"""Beyond this many cycles float32 no longer holds the sums exactly, and the check would lie."""
_SEAM = 1e-3
"""The greatest part of all elements that may be torn at the seams between two versions."""
HOST = "127.0.0.1"

TCP: Mapping[str, str] = {
    "raw": "benchmarks.peers.raw",
    "aiops": "benchmarks.peers.ours",
    "pyzmq": "benchmarks.peers.pyzmq",
    "gloo": "benchmarks.peers.gloo",
    "grpc": "benchmarks.peers.grpc_bytes",
    "torch_rpc": "benchmarks.peers.torch_rpc",
    "mpi_tcp": "benchmarks.peers.mpi_tcp",
}
"""The peers over loopback TCP by name, in the order of the report, and their modules."""
SAME_HOST: Mapping[str, str] = {
    "memcpy": "benchmarks.peers.memcpy",
    "shared": "benchmarks.peers.shared",
    "room": "benchmarks.peers.room",
    "views": "benchmarks.peers.views",
    "mpi": "benchmarks.peers.mpi",
    "ray": "benchmarks.peers.ray_actor",
}
"""The peers that share memory, likewise."""
GPU: Mapping[str, str] = {"cuda": "benchmarks.peers.cuda"}
"""aiops on a GPU, beside aiops on the host: `shared`."""
TLS: Mapping[str, str] = {
    "tls": "benchmarks.peers.tls",
    "checksums": "benchmarks.peers.checksums",
}
"""aiops over TLS, and with checksums, beside aiops over TCP."""
MODULES: Mapping[str, str] = {**TCP, **SAME_HOST, **GPU, **TLS}
"""All of them."""
KEEP_MEMORY: Mapping[str, str] = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}
"""Has glibc keep freed memory. Without it, a library that allocates every message has each one
mapped, zeroed and unmapped by the kernel: up to two thirds of its speed at 64 MiB."""


@dataclass(frozen=True)
class Ratio:
    """A column of the report: cycles per second beside another peer's, of the same round."""

    name: str
    beside: tuple[str, ...]
    """The peers it is taken beside: the best of them."""
    group: Mapping[str, str]
    """The peers that have it. Those of no group, a user's own module, have them all."""

    @property
    def key(self) -> str:
        """Return the name of the figure."""
        return f"x_{self.name}"


RATIOS = (
    Ratio("raw", ("raw",), TCP),
    Ratio("best", ("pyzmq", "gloo", "grpc", "torch_rpc"), TCP),
    Ratio("memcpy", ("memcpy",), SAME_HOST),
    Ratio("mpi", ("mpi",), SAME_HOST),
    Ratio("ray", ("ray",), SAME_HOST),
    Ratio("host", ("shared",), GPU),
    Ratio("plain", ("aiops",), TLS),
)
"""``raw`` and ``memcpy`` are limits rather than peers to beat. MPI over TCP is shown, but is not
among the best: it waits in a busy loop, at the price of a core per process, and the others do not.
"""


@dataclass(frozen=True)
class Job:
    """The job of one team of a server and its workers."""

    peer: str
    elements: int
    """Length of the float32 gradient and of the parameters; S is four times that, in bytes."""
    workers: int
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batch: bool = False
    """Whether the workers are batch processes, as those of ``aiops run`` that outnumber the
    processors."""

    @property
    def nbytes(self) -> int:
        """S: the bytes of one gradient."""
        return 4 * self.elements


@dataclass(frozen=True)
class Lap:
    """One worker's cycles: when the first began and the last ended, and the seconds of each."""

    start: float
    end: float
    seconds: npt.NDArray[np.float64]


class ServerSide(Protocol):
    """The side that holds the parameters."""

    def start(self) -> str:
        """Listen, serve in threads or processes of its own, and return the address to join."""

    def parameters(self) -> Array:
        """Return the parameters that the server holds; called when all workers are quiet."""

    def close(self) -> None:
        """End in good order; raises when what it runs did not."""


class WorkerSide(Protocol):
    """The side that makes gradients; connected once its constructor returns."""

    params: Array
    """The worker's own array, the same one in every cycle; with ``views``, that of the last one."""

    def cycle(self) -> None:
        """Push the gradient, wait for the update, and leave the new parameters in ``params``."""

    def close(self) -> None:
        """Disconnect."""


@runtime_checkable
class Restless(Protocol):
    """A worker whose server waits in a busy loop, and would take a core from the next peer.

    Both are called for every worker, and are not timed.
    """

    def wake(self) -> None:
        """Tell the server that a run begins."""

    def rest(self) -> None:
        """Tell the server that it is over: it sleeps when all workers have told it."""


@runtime_checkable
class Overlapping(Protocol):
    """A worker that has several cycles under way at once, and times them itself."""

    def run(self, cycles: int) -> Times:
        """Run ``cycles``; return when each began and when it ended (`time.perf_counter`)."""


@runtime_checkable
class SelfChecking(Protocol):
    """A server whose cycles are not plain SGD of the one gradient, and that checks itself.

    A worker may be so as well: then it returns how its parameters read.
    """

    def check(self, cycles: int) -> str | None:
        """Raise ValueError unless all is as that number of cycles of all workers leaves it."""


class PeerModule(Protocol):
    """A module of this package."""

    SETTINGS: Mapping[str, Setting]
    ENVIRONMENT: Mapping[str, str]
    missing: Callable[[], str | None]
    Server: Callable[[Job], ServerSide]
    Worker: Callable[[Job, str, int], WorkerSide]


def load(name: str) -> PeerModule:
    """Import a peer by its name in `MODULES`, or by that of any module: ``package.module``."""
    return cast(PeerModule, importlib.import_module(MODULES.get(name, name)))


def lacks(module: str, how: str) -> str | None:
    """Say that ``module`` is not installed and how to get it, or None when it is there."""
    if importlib.util.find_spec(module) is not None:
        return None
    return f"{module} is not installed; {how}"


def gradient(elements: int) -> Array:
    """Return the gradient that every worker pushes: the integers 1..7, repeated."""
    return (1 + np.arange(elements, dtype=np.uint32) % _PERIOD).astype(np.float32)


def pieces(array: Array, nbytes: int) -> list[Array]:
    """Cut an array into views of ``nbytes`` bytes each, the last one perhaps shorter."""
    step = max(nbytes // 4, 1)
    return [array[start : start + step] for start in range(0, array.size, step)]


def check_server(theta: Array, cycles: int) -> None:
    """Raise ValueError unless ``theta`` is exactly what ``cycles`` updates from zero give."""
    if cycles > MAX_CYCLES:
        raise ValueError(
            f"{cycles} cycles are too many for an exact check; run at most {MAX_CYCLES}"
        )
    wanted = gradient(theta.size)
    wanted *= np.float32(-cycles * LEARNING_RATE)
    wrong = np.flatnonzero(theta != wanted)
    if wrong.size:
        first = int(wrong[0])
        raise ValueError(
            f"the server's parameters are wrong in {wrong.size} of {theta.size} places after"
            f" {cycles} cycles: [{first}] is {theta[first]}, expected {wanted[first]}"
        )


def check_worker(params: Array, own: int, total: int, whole: bool) -> str:
    """Check a worker's parameters, and return how they read: ``whole``, ``mixed`` or ``torn``.

    Every element has to be its value after n updates, with ``own <= n <= total``: a worker sees its
    own cycles and no more than all workers'. The n are the same in *whole* parameters. In *mixed*
    ones they differ; and in *torn* ones some few elements are no version's at all, because the
    network cut between the bytes of a number that was being updated. Unless this is expected
    (``whole=False``), and always when it is more than a seam, it raises ValueError.
    """
    versions = params.astype(np.float64) / (gradient(params.size) * -LEARNING_RATE)
    torn = (versions != np.rint(versions)) | (versions < own) | (versions > total)
    low, high = float(versions.min()), float(versions.max())
    found = "torn" if torn.any() else "whole" if low == high else "mixed"
    if (whole and found != "whole") or torn.mean() > _SEAM:
        raise ValueError(
            f"a worker's parameters are {found}: of versions {low:g} to {high:g},"
            f" expected one whole version from {own} to {total}"
        )
    return found


def load_sgd() -> Callable[[Array, Array], None]:
    """Return ``sgd(theta, g)``: theta -= lr * g in place, the same function for every peer.

    One fused Numba loop that releases the interpreter lock; without Numba the same in NumPy, in
    blocks that stay in cache.
    """
    try:
        import numba
    except ImportError:
        return _blocked_sgd
    g_type = numba.types.Array(numba.float32, 1, "C", readonly=True, aligned=False)
    signatures = [
        numba.void(numba.float32[::1], numba.float32[::1], numba.float32),
        # A gradient may lie anywhere in a receive buffer.
        numba.void(numba.float32[::1], g_type, numba.float32),
    ]
    fused = numba.njit(signatures, nogil=True, cache=True)(_sgd_loop)
    rate = np.float32(LEARNING_RATE)

    def sgd(theta: Array, g: Array) -> None:
        fused(theta, g, rate)

    return sgd


def _sgd_loop(theta: Array, g: Array, rate: np.float32) -> None:
    for i in range(theta.size):
        theta[i] -= rate * g[i]


_BLOCK = 32 * 1024


def _blocked_sgd(theta: Array, g: Array) -> None:
    rate = np.float32(LEARNING_RATE)
    step = np.empty(min(_BLOCK, theta.size), np.float32)
    for start in range(0, theta.size, _BLOCK):
        part = theta[start : start + _BLOCK]
        np.multiply(g[start : start + _BLOCK], rate, out=step[: part.size])
        part -= step[: part.size]
