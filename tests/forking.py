"""Programs that fork while they hold something of aiops: ``python -m tests.forking CASE URL``.

Each is a process of its own, because a fork copies all that its process has. In every case the
parent pushes `STEPS` gradients, between them forks, and has each child try everything that is
inherited; it prints what came of that as one line of JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import aiops
from aiops.client import ModelAverager
from aiops.errors import AiopsError
from aiops.model.layout import Array
from tests.peers import eventually
from tests.support import PATIENCE, ServerThread

STEPS = 6
COUNT = 1 << 15
"""Elements: enough for a server on the same machine to share them."""

MODEL = {"w": np.zeros(COUNT, np.float32)}

Tries = Mapping[str, Callable[[], Any]]


def gradient(step: int) -> dict[str, Array]:
    """A gradient that adds 1 to one element, under asgd with lr=1."""
    found = np.zeros(COUNT, np.float32)
    found[step] = -1
    return {"w": found}


def outcome(do: Callable[[], Any]) -> str:
    """What became of a call: the kind of error and its text, or 'returned'."""
    try:
        do()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "returned"


def child(work: Callable[[], Any], *, abrupt: bool = False) -> Any:
    """Do some work in a fork of this process; return what it returned.

    The child then ends as programs do, with all that is to be done at the end; or is ``abrupt``.
    """
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        with open(reading, "rb") as file:
            said = file.read()
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"the child ended with {status}: {said!r}"
        return json.loads(said)
    try:
        said = json.dumps(work()).encode()
        gc.collect()
        os.write(writing, said)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    if abrupt:
        os._exit(0)
    os.close(writing)
    sys.exit(0)


def tried(tries: Tries) -> dict[str, str]:
    """What became of each."""
    return {name: outcome(do) for name, do in tries.items()}


def sockets() -> int:
    """How many sockets this process has."""
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one of this listing
            found += stat.S_ISSOCK(os.stat(f"/proc/self/fd/{name}").st_mode)
    return found


def report(**said: Any) -> None:
    print(json.dumps(said), flush=True)


# ---------------------------------------------------------------- blocking


def of_client(client: aiops.Client, params: Any) -> Tries:
    return {
        "push": lambda: client.push(params, gradient(COUNT - 1)),
        "exchange": lambda: client.exchange(params, gradient(COUNT - 1)),
        "fetch": lambda: client.fetch(params),
        "define": lambda: client.define(MODEL),
        "stats": client.stats,
        "ping": client.ping,
        "attend": client.attend,
        "interrupt": client.interrupt,
    }


def client(url: str) -> None:
    """`Client`, with a child between any two pushes."""
    used, children = [], []
    with aiops.Client(url, role="worker") as one:
        params = one.define(MODEL)
        for step in range(STEPS):
            children.append(child(lambda: {**tried(of_client(one, params)), "close": one.close()}))
            used.append(one.exchange(params, gradient(step)).used)
    report(used=used, children=children)


def of_worker(worker: Any) -> Tries:
    return {
        "step": lambda: worker.step(gradient(COUNT - 1)),
        "step again": lambda: worker.step(lambda params: gradient(COUNT - 1)),
        "refresh": worker.refresh,
        "stats": worker.stats,
    }


def worker(url: str) -> None:
    """`Worker`; the children end within its ``with`` block."""
    used, children = [], []
    with aiops.Worker(url, MODEL) as one:
        for step in range(STEPS):
            children.append(child(lambda: {**tried(of_worker(one)), "sockets": sockets()}))
            used.append(one.step(gradient(step)).used)
    report(used=used, children=children)


def computing(url: str) -> None:
    """`Worker`, with a fork in the midst of a step, whose child goes on with it."""
    used, children = [], []
    with aiops.Worker(url, MODEL) as one:
        for step in range(STEPS):
            reading, writing = os.pipe()
            parent = os.getpid()

            def compute(params: Any, step: int = step) -> dict[str, Array]:
                process = os.fork()
                if process:
                    os.waitpid(process, 0)
                return gradient(step if process else COUNT - 1)

            said = ""
            try:
                used.append(one.step(compute).used)
            except AiopsError as error:
                said = f"{type(error).__name__}: {error}"
            if os.getpid() != parent:
                os.write(writing, json.dumps({"step": said}).encode())
                sys.exit(0)
            os.close(writing)
            with open(reading, "rb") as file:
                children.append(json.loads(file.read()))
    report(used=used, children=children)


def room(url: str) -> None:
    """`Worker`, whose children write into memory that the server reads its gradients from."""
    used, children = [], []
    with aiops.Worker(url, MODEL) as one:
        for step in range(STEPS):
            grads = one.room()
            grads["w"][...] = gradient(step)["w"]

            def write(grads: Any = grads) -> dict[str, str]:
                grads["w"][...] = gradient(COUNT - 1)["w"]
                return tried({"step": lambda: one.step(grads)})

            children.append(child(write))
            used.append(one.step(grads).used)
    report(used=used, children=children)


def context(url: str) -> None:
    """`Worker`, used in the processes of `multiprocessing`."""
    fork = multiprocessing.get_context("fork")
    used, children = [], []
    with aiops.Worker(url, MODEL) as one:
        for step in range(STEPS):
            answers = fork.SimpleQueue()

            def use(answers: Any = answers) -> None:
                answers.put(tried(of_worker(one)))

            process = fork.Process(target=use)
            process.start()
            used.append(one.step(gradient(step)).used)
            children.append(answers.get())
            process.join()
    report(used=used, children=children)


def beside(url: str) -> None:
    """`Worker`, with a fork while another of its threads waits in a call, and has the lock."""
    with aiops.Worker(url, MODEL) as one, aiops.Client(url) as watching:
        waiting = threading.Thread(target=one.step, args=[gradient(0)])
        waiting.start()
        eventually(lambda: watching.stats()["waiting"] == 1, "the push is at the barrier")
        said = child(lambda: {**tried(of_worker(one)), "close": one.close()})
        with aiops.Worker(url, MODEL) as other:  # it opens the barrier
            other.step(gradient(1))
        waiting.join()
    report(used=[True], children=[said])


def killed() -> None:
    """Kill this process, and have a child live on until its standard input ends."""
    if os.fork():
        os.kill(os.getpid(), signal.SIGKILL)
    sys.stdin.read()
    os._exit(0)


def orphan(url: str) -> None:
    """`Worker`, of a parent that is killed while its child lives on."""
    one = aiops.Worker(url, MODEL, name="killed")
    one.step(gradient(0))
    killed()


# ---------------------------------------------------------------- asyncio


def awaiting(calls: Mapping[str, Callable[[], Awaitable[Any]]]) -> dict[str, str]:
    """What becomes of calls that are awaited on an event loop of the child's own."""

    async def one(call: Callable[[], Awaitable[Any]]) -> None:
        async with asyncio.timeout(PATIENCE):
            await call()

    return tried({name: partial(asyncio.run, one(call)) for name, call in calls.items()})


def async_client(url: str) -> None:
    """`AsyncClient`, with other calls under way."""

    async def main() -> None:
        used, children = [], []
        async with aiops.AsyncClient(url, role="worker") as one:
            params = await one.define(MODEL)
            calls = {
                "push": lambda: one.push(params, gradient(COUNT - 1)),
                "exchange": lambda: one.exchange(params, gradient(COUNT - 1)),
                "fetch": lambda: one.fetch(params),
                "stats": one.stats,
                "ping": one.ping,
                "connect": one.connect,
            }
            for step in range(STEPS):
                under_way = asyncio.ensure_future(one.stats())
                await asyncio.sleep(0)
                children.append(
                    child(
                        lambda: {**awaiting(calls), "close": asyncio.run(one.close())},
                        abrupt=True,
                    )
                )
                used.append((await one.exchange(params, gradient(step))).used)
                await under_way
        report(used=used, children=children)

    asyncio.run(main())


def async_worker(url: str) -> None:
    """`AsyncWorker`."""

    async def main() -> None:
        used, children = [], []
        async with aiops.AsyncWorker(url, MODEL) as one:
            calls = {
                "step": lambda: one.step(gradient(COUNT - 1)),
                "refresh": one.refresh,
                "stats": one.stats,
                "connect": one.connect,
            }
            for step in range(STEPS):
                children.append(
                    child(
                        lambda: {**awaiting(calls), "close": asyncio.run(one.close())},
                        abrupt=True,
                    )
                )
                used.append((await one.step(gradient(step))).used)
        report(used=used, children=children)

    asyncio.run(main())


def uv_worker(url: str) -> None:
    """`AsyncWorker` on uvloop."""
    import uvloop

    with contextlib.ExitStack() as stack:
        policy = asyncio.get_event_loop_policy()
        asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
        stack.callback(asyncio.set_event_loop_policy, policy)
        async_worker(url)


def async_orphan(url: str) -> None:
    """`AsyncWorker`, of a parent that is killed while its child lives on."""

    async def main() -> None:
        async with aiops.AsyncWorker(url, MODEL, name="killed") as one:
            await one.step(gradient(0))
            killed()

    asyncio.run(main())


def not_connected(url: str) -> None:
    """`AsyncWorker`, made before the fork and connected on both sides of it."""

    async def steps(one: aiops.AsyncWorker) -> list[bool]:
        async with one:
            return [(await one.step(gradient(step))).used for step in range(STEPS)]

    one = aiops.AsyncWorker(url, MODEL)
    said = child(lambda: tried({"connect": lambda: asyncio.run(steps(one))}))
    report(used=asyncio.run(steps(one)), children=[said])


# ---------------------------------------------------------------- averaging


def averager(url: str) -> None:
    """`ModelAverager`: two of them in the parent, which average after each fork."""

    def both(do: Callable[[ModelAverager], Any]) -> list[Any]:
        found: list[Any] = [None, None]

        def one(index: int) -> None:
            found[index] = do(averagers[index])

        threads = [threading.Thread(target=one, args=[index]) for index in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    models = [{"w": np.full(COUNT, float(start), np.float32)} for start in (1, 1)]
    averagers = [ModelAverager(url, models[0])]
    made: list[ModelAverager] = []
    coming = threading.Thread(target=lambda: made.append(ModelAverager(url, models[1])))
    coming.start()
    with aiops.Client(url) as watching:
        eventually(lambda: watching.stats()["averages"]["ready"] == 1, "the newcomer is ready")
    averagers[0].average()
    coming.join()
    averagers += made

    def step() -> None:
        with averagers[0].step():
            pass

    def locked() -> None:
        with averagers[0].lock:
            pass

    tries = {
        "step": step,
        "average": averagers[0].average,
        "abort": averagers[0].abort,
        "resume": averagers[0].resume,
    }

    def inherited() -> Any:
        locked()
        pairs = len(averagers)  # with which threads wake their event loops
        said = {**tried(tries), "close": averagers[0].close()}
        return {**said, "sockets": sockets() - 2 * pairs}

    used, children = [], []
    for _ in range(STEPS):
        with averagers[1].step():
            children.append(child(inherited, abrupt=True))
        models[0]["w"][0] += 1
        used.append(both(lambda one: one.average()) == [2, 2])
    same = bool(np.array_equal(models[0]["w"], models[1]["w"]))
    both(lambda one: one.close())
    report(used=[*used, same], children=children)


# ---------------------------------------------------------------- PyTorch


def optimizer(url: str) -> None:
    """`RemoteOptimizer`, forgotten by the children, or used and closed by them."""
    import torch

    from aiops.client.torch import RemoteOptimizer

    param = torch.nn.Parameter(torch.zeros(COUNT))
    used, children = [], []
    held = [RemoteOptimizer([("w", param)], url)]

    def push(step: int) -> None:
        param.grad = torch.from_numpy(gradient(step)["w"])
        held[0].step()

    def forgotten() -> dict[str, Any]:
        gone = weakref.ref(held[0])
        held.clear()
        gc.collect()
        return {"close": gone() and "is still there"}

    def used_and_closed() -> dict[str, Any]:
        said = tried({"step": lambda: push(COUNT - 1), "refresh": held[0].refresh})
        return {**said, "close": held[0].close()}

    for step in range(STEPS):
        if not step:
            children += [child(forgotten), child(used_and_closed)]
        push(step)
        assert held[0].last is not None
        used.append(held[0].last.used)
    held[0].close()
    report(used=used, children=children)


def loader(url: str) -> None:
    """A `DataLoader` with two processes, in each epoch new ones, whose data set refers to one."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    from aiops.client.torch import RemoteOptimizer

    param = torch.nn.Parameter(torch.zeros(COUNT))
    opt = RemoteOptimizer([("w", param)], url)

    class Data(Dataset[Any]):
        def __init__(self) -> None:
            self.opt = opt

        def __len__(self) -> int:
            return STEPS

        def __getitem__(self, index: int) -> Any:
            if index % 2:
                return index, ""
            param.grad = torch.from_numpy(gradient(COUNT - 1)["w"])
            return index, outcome(self.opt.step)

    used, children, step = [], [], 0
    for _epoch in range(2):
        for [index], [said] in DataLoader(Data(), num_workers=2):
            if step < STEPS and int(index) % 2:
                param.grad = torch.from_numpy(gradient(step)["w"])
                opt.step()
                assert opt.last is not None
                used.append(opt.last.used)
                step += 1
            if said:
                children.append({"step": said})
    opt.close()
    report(used=used, children=children)


# ---------------------------------------------------------------- servers


@contextlib.contextmanager
def sleeping() -> Iterator[None]:
    """Have a child that holds on to all that it inherited, and ends in the end."""
    reading, writing = os.pipe()
    said, saying = os.pipe()
    process = os.fork()
    if not process:
        os.close(writing)
        gc.collect()
        os.write(saying, b".")
        os.read(reading, 1)
        sys.exit(0)
    os.read(said, 1)
    try:
        yield
    finally:
        os.close(writing)
        _, status = os.waitpid(process, 0)
        assert os.waitstatus_to_exitcode(status) == 0


def serving(folder: str) -> None:
    """A server in this process; a child of it outlives it, and a second takes its port."""
    record, save = Path(folder, "journal"), Path(folder, "model.safetensors")
    settings: dict[str, Any] = {"policy": "asgd", "set": {"lr": 1}, "kernels": "numpy"}
    used, near = [], []

    def written() -> list[tuple[int, int]]:
        paths = [*record.iterdir(), save]
        return [(path.stat().st_size, path.stat().st_mtime_ns) for path in paths]

    with contextlib.ExitStack() as stack:
        silent = stack.enter_context(socket.socket())
        silent.settimeout(PATIENCE)
        with ServerThread(record=record, save=save, **settings) as first:
            port = first.server.port if first.server is not None else 0
            silent.connect(("127.0.0.1", port))
            with aiops.Worker(first.url, MODEL) as one:
                used.append(one.step(gradient(0)).used)
                stack.enter_context(sleeping())
                used += [one.step(gradient(step)).used for step in range(1, STEPS)]
                near.append(one.near)
        assert not silent.recv(1), "the server is over, and a child of it has its connection"
        ended = written()
        with (
            ServerThread(port=port, **settings) as second,
            aiops.Worker(second.url, MODEL) as one,
        ):
            used.append(one.step(gradient(0)).used)
            near.append(one.near)
    report(used=used, children=[], near=near, same=written() == ended)


def leaving(folder: str) -> None:
    """A server in the event loop of a child that ends in the midst of it: it writes nothing."""
    save, record = Path(folder, "model.safetensors"), Path(folder, "journal")

    async def main() -> None:
        async with (
            aiops.serve(policy="asgd", port=0, save=save, record=record) as server,
            aiops.AsyncWorker(server.url, MODEL) as one,
        ):
            used = (await one.step(gradient(0))).used
            fork_and_report(used)

    def fork_and_report(used: bool) -> None:
        before = {path.name: path.read_bytes() for path in record.iterdir()}
        process = os.fork()
        if process:
            os.waitpid(process, 0)
            same = {path.name: path.read_bytes() for path in record.iterdir()} == before
            report(used=[used], children=[], saved=save.exists(), same=same)
            os._exit(0)  # the child has closed the loop, which was this process's, too

    asyncio.run(main())


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
