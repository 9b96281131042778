from __future__ import annotations

import pytest

from aiops.errors import AiopsError, UsageError
from aiops.lab.workloads import DATASETS, DamagedData, DataUnavailable, load


def test_the_names() -> None:
    assert DATASETS == ("digits", "mnist", "cifar10", "synthetic")


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_what_needs_no_files_loads_offline(name: str) -> None:
    assert load(name, download=False).name == name


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="'minst'; did you mean 'mnist'"):
        load("minst")
    with pytest.raises(UsageError, match="known: cifar10, digits, mnist, synthetic"):
        load("?")


def test_the_errors_are_aiops_errors() -> None:
    assert issubclass(DamagedData, DataUnavailable)
    assert issubclass(DataUnavailable, AiopsError)
