"""Trials of hostile peers: what their reports say."""

from __future__ import annotations

import json
import re

import pytest

from aiops.common import urls
from aiops.errors import UsageError
from aiops.lab.torture.attack_trial import told


def test_a_report_names_no_folder_of_the_machine() -> None:
    with pytest.raises(UsageError) as ours:
        urls.parse("nonsense://")
    assert re.search(r" \(aiops/common/urls\.py:\d+\)$", told(ours.value))
    with pytest.raises(json.JSONDecodeError) as foreign:
        json.loads("{")
    assert re.search(r" \(decoder\.py:\d+\)$", told(ExceptionGroup("all", [foreign.value])))
