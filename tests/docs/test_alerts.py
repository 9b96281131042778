"""deploy/prometheus and deploy/grafana name what a server exposes, and say what they should.

promtool judges the rules where it is installed; names and labels are compared with real servers'.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import urllib.request
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiops
from aiops.metrics.catalog import METRICS
from tests.metrics.lint import families
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

yaml = pytest.importorskip("yaml")
pytest.importorskip("prometheus_client")

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
RULES = yaml.safe_load((PROMETHEUS / "aiops.rules.yaml").read_text())["groups"][0]["rules"]
BOARD = json.loads((ROOT / "deploy" / "grafana" / "aiops.json").read_text())
PAGE = (ROOT / "docs" / "guide-monitoring.md").read_text()
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = {
    **{rule["alert"]: rule["expr"] for rule in RULES},
    **{
        f"{panel['title']} {target['refId']} {panel['id']}": target["expr"]
        for panel in PANELS
        for target in panel["targets"]
    },
}
BY_PROMETHEUS = {"job", "instance"}
NAME = re.compile(r"\b((?:aiops|process)_\w+|up)\b(?:\{([^}]*)\})?")
promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool")

MODEL = {"w": np.ones((64, 64), np.float32), "b": np.ones(3, np.float32)}

Labels = dict[str, set[str]]
Exposed = dict[str, Labels]


def gradients() -> dict[str, np.ndarray]:
    return {name: 0.01 * np.ones_like(array) for name, array in MODEL.items()}


def read(url: str) -> str:
    with urllib.request.urlopen(f"{url}/metrics", timeout=PATIENCE) as answer:
        text: str = answer.read().decode()
        return text


RUN: dict[str, Any] = {
    "policy": "fasgd",
    "kernels": "numpy",
    "push_codec": "int8",
    "filter": "norm",
    "bandwidth_budget": "100MB/s",
    "metrics_port": 0,
}


async def texts_of_two(primary: str, url: str, folder: Path) -> tuple[str, str]:
    """Return what a standby exposes once it is fed, and its primary with all that it has."""
    mine = theirs = ""
    async with aiops.serve(standby=primary, state=str(folder), port=0, **RUN) as standby:
        while "\naiops_standby_fed 1.0\n" not in mine:
            mine = await asyncio.to_thread(read, standby.metrics_url)
        later = ("aiops_state_copy_failed", "aiops_standby_lag", "aiops_tensor_norm")
        while not all(f"\n{name}" in theirs for name in later):
            theirs = await asyncio.to_thread(read, url)
    return mine, theirs


def texts(folder: Path) -> Iterator[str]:
    """Yield what servers expose that have, together, all that there is to watch."""
    copies = (folder / "copies").as_uri()
    with ServerThread(state=folder / "a", state_copy=copies, **RUN) as server:
        url = server.call(lambda running: running.metrics_url)
        with aiops.Worker(server.url, MODEL, name="w") as worker:
            for _ in range(40):  # the first teach the filter
                worker.step(gradients())
            yield from asyncio.run(texts_of_two(server.url, url, folder / "b"))
    given: dict[str, Any] = {"shards": 2, "no_shm": True, "metrics_port": 0}
    with ServerThread(**given) as server, aiops.Worker(server.url, MODEL, name="w") as worker:
        worker.step(gradients())
        with aiops.Client(server.url) as client:
            client.log(accuracy=0.5)
            client.stats()  # it has been taken
            yield read(server.call(lambda running: running.metrics_url))


@pytest.fixture(scope="module")
def exposed(tmp_path_factory: pytest.TempPathFactory) -> Exposed:
    """By metric: its labels, each with the values that it has."""
    pytest.importorskip("pyarrow")
    found: Exposed = defaultdict(lambda: defaultdict(set))
    for text in texts(tmp_path_factory.mktemp("runs")):
        for samples in families(text).values():
            for name, labels, _value in samples:
                for label, value in labels.items():
                    found[name][label].add(value)
                found[name]["job"] = found[name]["instance"] = {""}
    found["up"]["job"] = found["up"]["instance"] = {""}
    return {name: dict(labels) for name, labels in found.items()}


def faults(expression: str, exposed: Exposed) -> Iterator[str]:
    """Yield what an expression names that no server exposes."""
    labels: set[str] = set()
    for name, selector in NAME.findall(expression):
        if name not in exposed:
            yield f"no metric {name}"
            continue
        labels |= exposed[name].keys()
        for label, sign, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
            if label not in exposed[name]:
                yield f"{name} has no label {label}"
            elif sign == "=" and value not in exposed[name][label]:
                yield f"{name} has no {label} {value!r}"
    for listed in re.findall(r"\b(?:by|on|without)\s*\(([^)]*)\)", expression):
        for label in listed.split(","):
            if label.strip() not in labels:
                yield f"no label {label.strip()}"


@pytest.mark.slow
def test_expressions_name_what_servers_expose(exposed: Exposed) -> None:
    wrong = {name: [*faults(expr, exposed)] for name, expr in EXPRESSIONS.items()}
    assert not {name: said for name, said in wrong.items() if said}


@pytest.mark.slow
def test_this_test_sees_what_is_wrong(exposed: Exposed) -> None:
    for expression, said in {
        "aiops_update_total > 1": "no metric aiops_update_total",
        'aiops_workers{kind="x"}': "aiops_workers has no label kind",
        'aiops_workers{state="gone"}': "aiops_workers has no state 'gone'",
        "sum by (shard) (aiops_ready)": "no label shard",
    }.items():
        assert [*faults(expression, exposed)] == [said]


@pytest.mark.slow
def test_the_metrics_that_no_run_here_has_are_known(exposed: Exposed) -> None:
    """All others of the catalogue were exposed: none reads a key that reports have not."""
    found = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in exposed}
    lacking = {metric.name for metric in METRICS} - found
    assert lacking == {
        *("aiops_schedule_position", "aiops_budget_worker_bytes_per_second"),
        *("aiops_table_stored_rows", "aiops_table_bytes", "aiops_table_evicted_rows_total"),
        *("aiops_data_set_epoch", "aiops_data_set_seen_examples"),
        *("aiops_token_connections", "aiops_token_refused_total"),
        *("aiops_token_waited_seconds_total", "aiops_budget_utilisation_ratio"),
    }


def test_every_alert_says_what_it_is() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert "$labels.instance" in rule["annotations"]["summary"]
        assert f"| `{rule['alert']}` | {rule['labels']['severity']} |" in PAGE


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = yaml.safe_load((PROMETHEUS / "aiops.test.yaml").read_text())["tests"]
    fires: dict[str, set[bool]] = defaultdict(set)
    for test in tests:
        for each in test["alert_rule_test"]:
            fires[each["alertname"]].add(bool(each["exp_alerts"]))
    assert fires == {rule["alert"]: {False, True} for rule in RULES}


@promtool
@each_row(
    "arguments",
    [
        ("check", "rules", "aiops.rules.yaml"),
        ("check", "config", "prometheus.yaml"),
        ("test", "rules", "aiops.test.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], cwd=PROMETHEUS, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
@pytest.mark.slow
def test_a_recorded_run_raises_no_alert_until_pushes_are_paused(tmp_path: Path) -> None:
    """Scrapes of a real run, as if they were a minute apart; then its administrator pauses it."""
    scrapes: list[dict[tuple[str, str], float]] = []
    with ServerThread(policy="asgd", kernels="numpy", metrics_port=0) as server:
        url = server.call(lambda running: running.metrics_url)
        with aiops.Worker(server.url, MODEL, name="w") as worker:
            for number in range(40):
                if number < 20:
                    worker.step(gradients())
                if number == 20:
                    server.call(lambda running: running.engine.closure.pause("an upgrade"))
                found = families(read(url))
                samples = [each for family in found.values() for each in family]
                scrapes.append({(n, json.dumps(s)): v for n, s, v in samples})
    series = [
        {
            "series": f"{name}{{{written(json.loads(labels))}}}",
            "values": " ".join(f"{each.get((name, labels), '_')}" for each in scrapes),
        }
        for name, labels in dict.fromkeys(key for each in scrapes for key in each)
    ]
    series.append({"series": 'up{job="aiops",instance="a"}', "values": "1x39"})
    own = {"job": "aiops", "instance": "a", "severity": "warning"}
    summaries = {rule["alert"]: rule["annotations"]["summary"] for rule in RULES}
    expected = {
        name: {
            "exp_labels": own,
            "exp_annotations": {
                "summary": summaries[name].replace("{{ $labels.instance }}", "a"),
            },
        }
        for name in ("AiopsNotReady", "AiopsNoUpdates")
    }
    tests = [
        {"alertname": name, "eval_time": time, "exp_alerts": [expected[name]] if late else []}
        for name in summaries
        for time, late in (("19m", False), ("39m", name in expected))
    ]
    run = {"interval": "1m", "input_series": series, "alert_rule_test": tests}
    rules = {"rule_files": [str(PROMETHEUS / "aiops.rules.yaml")], "evaluation_interval": "1m"}
    path = tmp_path / "recorded.yaml"
    path.write_text(yaml.safe_dump({**rules, "tests": [run]}))
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def written(labels: dict[str, str]) -> str:
    """Return labels as PromQL has them, those of Prometheus included."""
    return ",".join(f'{k}="{v}"' for k, v in {"job": "aiops", "instance": "a", **labels}.items())


def test_the_board_is_whole() -> None:
    assert BOARD["uid"] == "aiops"
    ids = [panel["id"] for panel in BOARD["panels"]]
    assert len(set(ids)) == len(ids)
    variables = {each["name"] for each in BOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert 'job=~"$job",instance=~"$instance"' in target["expr"]
