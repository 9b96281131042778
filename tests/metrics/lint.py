"""Check a text of metrics as ``promtool check metrics`` does, as far as prometheus_client can."""

from __future__ import annotations

import shutil
import subprocess

from prometheus_client.parser import text_string_to_metric_families

_NO_UNITS = {"milliseconds", "ms", "minutes", "hours", "kilobytes", "megabytes", "mb", "percent"}


def families(text: str) -> dict[str, list[tuple[str, dict[str, str], float]]]:
    """Parse a text; return the samples of each family, after checking all that can be checked."""
    found: dict[str, list[tuple[str, dict[str, str], float]]] = {}
    lines = text.splitlines()
    assert text.endswith("\n")
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        assert name not in found, f"{name} comes twice"
        assert f"# TYPE {name} {family.type}" in lines, name
        assert family.type in ("counter", "gauge", "histogram"), name
        assert family.documentation, name
        assert not _NO_UNITS & set(name.split("_")), name
        assert family.type == "counter" or not name.endswith("_total"), name
        seen = set()
        for sample in family.samples:
            key = sample.name, *sorted(sample.labels.items())
            assert key not in seen, f"{key} comes twice"
            seen.add(key)
            assert family.type == "gauge" or sample.value >= 0, key
        found[name] = [(s.name, dict(s.labels), s.value) for s in family.samples]
    promtool = shutil.which("promtool")
    if promtool is not None:
        command = [promtool, "check", "metrics"]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
    return found
