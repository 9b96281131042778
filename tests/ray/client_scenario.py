"""A job that is started through Ray Client (``ray://``), from outside of the cluster.

``python -m tests.ray.client_scenario``; it takes 15 s, so it is not one of the tests.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.ray.ray_head import free_port, ray_head  # isort: split

import numpy as np
import pytest
import ray.train

import aiops
import aiops.ray

STEPS = 50


def loop(config: dict[str, str]) -> str:
    """Take some steps; report, with a checkpoint."""
    folder = Path(config["folder"]) / f"from-{aiops.ray.get_context().get_world_rank()}"
    folder.mkdir()
    (folder / "note").write_text("kept")
    with aiops.Worker(params={"w": np.zeros(2, np.float32)}) as worker:
        for _ in range(STEPS):
            worker.step({"w": -np.ones(2, np.float32)})
    aiops.ray.report({"steps": STEPS}, ray.train.Checkpoint.from_directory(folder))
    return "returned"


def broken_loop() -> None:
    """Fail."""
    raise NameError("misspelt")


def main() -> None:
    """Run the scenario."""
    with tempfile.TemporaryDirectory(prefix="rc", dir="/tmp") as name:
        folder, client = Path(name), free_port()
        flags = "--num-cpus=4", f"--ray-client-server-port={client}"
        with ray_head(folder, free_port(), f"ray://127.0.0.1:{client}", *flags):
            assert ray.util.client.ray.is_connected()
            result = aiops.ray.train(
                loop,
                policy="asgd",
                lr=1.0,
                num_workers=2,
                name="stays",
                detached=True,
                config={"folder": name},
                run_config=ray.train.RunConfig(storage_path=str(folder / "runs")),
            )
            assert result.error is None
            assert (result.metrics, result.return_value) == ({"steps": STEPS}, "returned")
            with result.checkpoint.as_directory() as copy:
                assert (Path(copy) / "note").read_text() == "kept"
            server = aiops.ray.server("stays")
            with server.client() as observer:
                assert observer.fetch()["w"].tolist() == [2 * STEPS] * 2
            server.stop()
            with pytest.raises(ray.train.TrainingFailedError, match="NameError: misspelt"):
                aiops.ray.train(broken_loop, num_workers=1)
    print("all is well")


if __name__ == "__main__":
    main()
