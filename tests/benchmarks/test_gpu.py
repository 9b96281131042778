"""The GPU's benchmark, on the emulated device: a whole report, whose figures say nothing."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import gpu
from tests.devices import DEVICES, device_named


@pytest.mark.parametrize("name", DEVICES)
def test_a_tiny_run_makes_a_whole_report(name: str) -> None:
    found = gpu.run(device_named(name), 5000, 2, ("sgd", "fasgd"))
    names = ["limit: a copy", "sgd, fused", "fasgd, fused", "limit: upload", "a push, applied"]
    assert list(found["cells"]) == [*names, "limit: upload, download", "applied, and read"]
    assert len(list(gpu.cells(found))) == 4
    assert gpu.table(found).row_count == 7
    assert gpu.figure(found).panels[0].title == found["device"]


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def none(number: int) -> None:
        raise gpu.cupy_device.UsageError(f"there is no cuda:{number} here")

    monkeypatch.setattr(gpu.cupy_device, "CupyDevice", none)
    with pytest.raises(SystemExit):
        gpu.main(["--device", "cuda:3"])
    assert "there is no cuda:3 here" in capsys.readouterr().err
