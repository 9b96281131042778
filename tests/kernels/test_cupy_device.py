"""A GPU as a server's setting: what is refused and how, and whole servers on a device."""

from __future__ import annotations

import asyncio
import builtins
import dataclasses
import importlib.util
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops import testing
from aiops.errors import BadPush, UsageError
from aiops.kernels import cupy_device
from aiops.net.environment import CURRENT_ENVIRONMENT
from aiops.serving.config import Config
from aiops.serving.shard_processes import FOLLOWERS_SETTINGS
from tests.contract.cases import CASES
from tests.devices import DEVICES, device_named, gpu
from tests.emulated import EmulatedDevice
from tests.rows import each_row
from tests.support import ServerThread

PARAMS = {"w": np.linspace(-1, 1, 3000, dtype=np.float32), "b": np.ones(5, np.float32)}


def test_a_gpu() -> None:
    """Nothing: it is skipped where all that needs a GPU was left out."""
    if gpu() is None:
        pytest.skip("CuPy sees no GPU: the suites ran on the emulated device alone")


# ---------------------------------------------------------------- settings


class TestSettings:
    @each_row("name", ["gpu", "cuda:", "cuda:x", "cuda:-1", "CUDA", "cpu:0", ""])
    def test_names_that_are_none(self, name: str) -> None:
        with pytest.raises(UsageError, match=r"write cpu, cuda or cuda:N, such as cuda:0"):
            Config(device=name)

    def test_shards_have_the_same(self) -> None:
        assert Config(device="cuda:1", shards=2).flags(FOLLOWERS_SETTINGS) == ["--device=cuda:1"]
        assert Config(shards=2).flags(FOLLOWERS_SETTINGS) == []


class FakeRuntime(types.SimpleNamespace):
    """As much of CuPy's runtime as is asked before anything is opened."""

    class CUDARuntimeError(RuntimeError):
        pass

    def getDeviceCount(self) -> int:
        if isinstance(self.count, str):
            raise self.CUDARuntimeError(self.count)
        return self.count


@contextmanager
def cupy(
    found: Any, monkeypatch: pytest.MonkeyPatch, version: Any = lambda: (12, 9)
) -> Iterator[None]:
    module = types.ModuleType("cupy")
    nvrtc = types.SimpleNamespace(getVersion=version)
    module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        runtime=FakeRuntime(count=found), nvrtc=nvrtc
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    yield


class TestRefused:
    """Each in a sentence, before anything is opened."""

    def test_no_cupy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        real = builtins.__import__

        def without(name: str, *rest: Any) -> Any:
            if name == "cupy":
                raise ImportError("No module named 'cupy'")
            return real(name, *rest)

        monkeypatch.setattr(builtins, "__import__", without)
        with pytest.raises(UsageError, match=r"needs CuPy.*pip install 'aiops-ps\[cuda12\]'"):
            cupy_device.opened("cuda")

    @each_row(
        ("found", "text"),
        [
            (0, "cuda:2: there is no such GPU, but none; see nvidia-smi -L"),
            (1, "cuda:2: there is no such GPU, but cuda:0 alone"),
            (2, "cuda:2: there is no such GPU, but cuda:0 to cuda:1"),
            (
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient",
                "CUDA says 'CUDA driver version is insufficient'; see whether nvidia-smi shows",
            ),
        ],
    )
    def test_no_such_gpu(self, found: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with cupy(found, monkeypatch), pytest.raises(UsageError) as caught:
            cupy_device.opened("cuda:2")
        assert text in str(caught.value)

    def test_no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def version() -> None:
            raise RuntimeError('Failure finding "libnvrtc.so.12"\nand where it was looked for')

        with (
            cupy(1, monkeypatch, version),
            pytest.raises(UsageError, match=r'needs NVRTC, .*so.12"\): pip install .*\[cuda12\]'),
        ):
            cupy_device.opened("cuda")

    @pytest.mark.skipif(
        gpu() is not None or importlib.util.find_spec("cupy") is not None,
        reason="there is CuPy",
    )
    def test_a_server_says_so(self) -> None:
        async def main() -> None:
            async with aiops.serve(device="cuda", port=0):
                pass

        with pytest.raises(UsageError, match="--device cuda:0 needs CuPy"):
            asyncio.run(main())


# ---------------------------------------------------------------- servers


def on(device: Any) -> None:
    """Have servers of this context find that device, whatever they ask for."""
    env = dataclasses.replace(CURRENT_ENVIRONMENT.get(), device=lambda name: device)
    CURRENT_ENVIRONMENT.set(env)


async def trained(params: Any, steps: int = 12, **settings: Any) -> tuple[dict[str, bytes], Any]:
    """Four workers together; return what the parameters are then, and the report."""
    policy, chosen = settings.pop("case", ("fasgd", {}))

    async def work(url: str, number: int) -> None:
        random = np.random.default_rng(number)

        def gradient(at: Any) -> dict[str, Any]:
            return {
                name: (w - 0.3 + 0.1 * random.standard_normal(w.shape)).astype(w.dtype)
                for name, w in at.items()
            }

        async with aiops.AsyncWorker(url, params, name=f"w{number}") as worker:
            for _ in range(steps):
                await worker.step(gradient)

    async with aiops.serve(policy=policy, set=chosen, port=0, workers=4, **settings) as server:
        await asyncio.gather(*(work(server.url, number) for number in range(4)))
        async with aiops.AsyncClient(server.url) as client:
            found = await client.fetch()
            report = await client.stats()
    return {name: np.asarray(array).tobytes() for name, array in found.items()}, report


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("case", sorted(CASES))
def test_a_server_on_a_device_trains_the_same(name: str, case: str) -> None:
    """Every policy, through workers, a network and a server, in virtual time."""

    async def main(device: Any) -> tuple[dict[str, bytes], Any]:
        on(device)
        return await trained(PARAMS, 6, case=CASES[case])

    host, _report = testing.run(main(None))
    there, report = testing.run(main(device_named(name)))
    assert there == host
    assert report["kernels"] == "cuda"
    assert report["device"] == device_named(name).name


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"shards": 3},
        {"shards": 2, "push_codec": ["int8"]},
        {"push_codec": ["topk:0.1"]},
        {"push_codec": ["int8@w", "fp16"]},
        {"fetch_codec": ["int8"]},
        {"gate": "bfasgd:c_push=0.05"},
        {"case": ("fasgd", {"clip": 0.5})},
        {"case": ("dcasgd", {}), "shards": 2},
    ],
    ids=str,
)
def test_settings_go_with_a_device(name: str, settings: dict[str, Any]) -> None:
    async def main(device: Any) -> dict[str, bytes]:
        on(device)
        return (await trained(PARAMS, **settings))[0]

    assert testing.run(main(device_named(name))) == testing.run(main(None))


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("shm", [True, False])
def test_a_real_server_over_shared_memory_and_tcp(
    name: str, shm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels have a thread, arenas are shared; it saves, starts from a file, is profiled."""
    monkeypatch.setattr(cupy_device, "opened", lambda _setting: device_named(name))
    saved, profile = tmp_path / "model.safetensors", tmp_path / "profile.json"
    params = {"w": np.ones(70_000, np.float32)}
    for saved_before in (False, True):
        files = {"save": saved, "profile": profile, **({"init": saved} if saved_before else {})}
        with (
            ServerThread(policy="asgd", lr=0.1, device="cuda", no_shm=not shm, **files) as server,
            aiops.Worker(server.url, params) as worker,
        ):
            for _ in range(10):
                worker.step({"w": np.ones(70_000, np.float32)})
            found = np.array(worker.params["w"])
            report = worker.stats()
        assert report["device"] == device_named(name).name
    assert np.allclose(found, -1.0, atol=1e-5)
    assert report["profile"]["upload"]["calls"] >= 10
    assert report["profile"]["download"]["calls"] >= 9


@pytest.mark.skipif("emulated" not in DEVICES, reason="there is no g++ to compile with")
def test_a_model_too_large_for_the_device() -> None:
    """The worker is told why; the server goes on, and takes one that fits."""

    async def main() -> None:
        on(EmulatedDevice(capacity=100_000))
        async with aiops.serve(port=0) as server:
            with pytest.raises(BadPush, match="do not fit this server's memory: emulated has no"):
                async with aiops.AsyncWorker(server.url, {"w": np.ones(20_000, np.float32)}):
                    pass
            async with aiops.AsyncWorker(server.url, {"w": np.ones(100, np.float32)}) as worker:
                await worker.step({"w": np.ones(100, np.float32)})

    testing.run(main())
