"""The text that Prometheus reads."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from aiops.metrics import exposition
from aiops.metrics.catalog import INFO
from tests.metrics.lint import families

HOSTILE = [
    'q"uote',
    "back\\slash",
    "new\nline",
    "# HELP x",
    "{}",
    "\u202e",
    "\x00\x1b[31m",
    "é" * 99,
]


def test_an_empty_report_is_a_text_too() -> None:
    found = families(exposition.text({}, {"version": "1"}).decode())
    assert found[INFO] == [(INFO, {"version": "1"}, 1.0)]
    assert not [name for name in found if name.startswith("aiops_") and name != INFO]


def test_names_that_peers_choose_cannot_change_the_text() -> None:
    zeros = dict.fromkeys(("pushes", "refused", "ignored", "bytes_pushed", "bytes_fetched"), 0)
    row = {**zeros, "staleness": 0, "seconds_since_answer": 0.0}
    lines = [{"worker": n, "label": name, **row} for n, name in enumerate(HOSTILE)]
    report = {"workers": lines, "others": {"workers": 0}}
    text = exposition.text(report, {"policy": 'p"\n'}).decode()
    found = families(text)["aiops_worker_pushes_total"]
    assert [labels["worker"] for _name, labels, _value in found][:-1] == HOSTILE[:-1]
    assert len(found) == len(HOSTILE)


def test_the_lint_sees_what_is_wrong() -> None:
    good = "# HELP a_total A.\n# TYPE a_total counter\na_total 1\n"
    assert families(good) == {"a_total": [("a_total", {}, 1.0)]}
    for bad in (
        good.replace(" A.", ""),
        "# HELP a_ms A.\n# TYPE a_ms gauge\na_ms 1\n",
        good + "a_total 2\n",
        good.replace("1", "-1"),
    ):
        with pytest.raises(AssertionError):
            families(bad)
    assert [*text_string_to_metric_families(good)]
