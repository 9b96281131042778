"""The files of deploy/: what they call exists, they can be read, and the worker may be stopped."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiops.cli import main
from aiops.common.launchers import LAUNCHERS, OVERRIDES
from tests.rows import each_row
from tests.support import PATIENCE, ServerThread

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
PAGE = ROOT / "docs" / "guide-clusters.md"
TEXTS = [path for path in sorted(DEPLOY.rglob("*")) if path.is_file() and path.suffix != ".py"]
MANIFESTS = [*sorted((DEPLOY / "kubernetes").rglob("*.yaml")), DEPLOY / "compose.yaml"]


CALL = re.compile(r"\baiops ((?:join|serve|run|ping|doctor|stats)\b.*)")


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each call of aiops in a file, from the subcommand on."""
    text = re.sub(r"\\\n\s*", " ", path.read_text())
    for line in text.splitlines():
        listed = re.search(r"(\[\s*\".*\])", line)
        if listed:
            words = json.loads(listed[1])
            if words[0] in ("CMD", "aiops"):
                words = words[1 + (words[:2] == ["CMD", "aiops"]) :]
            if words and words[0] in main.COMMANDS:
                yield words
        elif "`" not in line and (found := CALL.search(line)):
            yield shlex.split(re.split(r" [#&|]|$\(", found[1])[0], comments=True)


CALLS = [
    pytest.param(words, id=f"{path.name}: {' '.join(words)}")
    for path in (*TEXTS, PAGE)
    for words in commands(path)
]


def test_there_are_calls() -> None:
    found = {param.id and param.id.partition(":")[0] for param in CALLS}
    assert {"Dockerfile", "compose.yaml", "server.yaml", "aiops.sbatch", "hosts.sh"} <= found


@each_row("words", CALLS)
def test_flags_exist(words: list[str]) -> None:
    command = main.command(words[0])
    known = {option for parameter in command.params for option in parameter.opts}
    takes_program = words[0] in ("run", "join")
    flags = dict[str, str]()
    rest = iter(words[1:])
    for word in rest:
        if not word.startswith("-"):
            if takes_program:
                break  # what follows is the program's
            continue
        name, equals, _ = word.partition("=")
        assert name in known, f"{words[0]} has no {name}"
        option = next(p for p in command.params if name in p.opts)
        flags[name] = "" if equals or option.is_flag else next(rest)
    if takes_program:
        assert any(word.endswith((".py", "$@")) for word in words)


@each_row("path", [p for p in TEXTS if p.suffix in (".sh", ".sbatch")], ids=str)
def test_scripts_are_well_formed(path: Path) -> None:
    shell = "bash" if path.read_text().startswith("#!/bin/bash") else "sh"
    subprocess.run([shell, "-n", path], check=True)


def test_mpirun_hands_on_what_traces_need(tmp_path: Path) -> None:
    mpirun = tmp_path / "mpirun"
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    mpirun.chmod(0o755)
    hosts = tmp_path / "hosts"
    hosts.write_text("# machines\nnode-7 slots=2\n")
    script = next(path for path in TEXTS if path.name == "hosts.sh")
    asked = {"AIOPS_TRACE": "otlp:http://a b:4318", "OTEL_SERVICE_NAME": "mine", "OTHER": "1"}

    def handed_on(more: dict[str, str]) -> list[str]:
        found = subprocess.run(
            ["sh", script, hosts, "2", "train.py"],
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **more},
            capture_output=True,
            text=True,
            check=True,
        )
        words = found.stdout.split("\n")
        assert words[-4:-1] == ["aiops", "join", "train.py"]
        return sorted(name for flag, name in itertools.pairwise(words) if flag == "-x")

    always = ["AIOPS_TOKEN", "MASTER_ADDR", "PATH"]
    assert handed_on({}) == always
    assert handed_on(asked) == sorted([*always, "AIOPS_TRACE", "OTEL_SERVICE_NAME"])


def documents(path: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml")
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@each_row("path", MANIFESTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_manifests_are_yaml(path: Path) -> None:
    for each in documents(path):
        assert "kind" in each or path.name == "compose.yaml"


def pods(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if document["kind"] in ("StatefulSet", "Job", "Deployment"):
        yield document["spec"]["template"]["spec"]


def test_pods_run_without_root_with_the_token_and_end_in_time() -> None:
    found = [
        pod
        for path in (DEPLOY / "kubernetes").rglob("*.yaml")
        for document in documents(path)
        for pod in pods(document)
    ]
    assert len(found) == 3
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["enableServiceLinks"] is False  # AIOPS_PORT is the server's own
        assert pod["terminationGracePeriodSeconds"] >= 30
        [container] = pod["containers"]
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert container["envFrom"] == [{"secretRef": {"name": "aiops-token"}}]
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert {volume["name"] for volume in pod["volumes"]} <= mounted


def test_the_workers_name_the_service() -> None:
    [service, server] = documents(DEPLOY / "kubernetes" / "base" / "server.yaml")
    name, port = service["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert server["spec"]["serviceName"] == name
    for folder in ("base", "elastic"):
        [workers] = documents(DEPLOY / "kubernetes" / folder / "workers.yaml")
        [pod] = pods(workers)
        variables = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert variables["AIOPS_URL"] == f"aiops://{name}:{port}"
        if "completions" in workers["spec"]:
            assert variables["WORLD_SIZE"] == str(workers["spec"]["completions"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
@pytest.mark.parametrize("folder", ["base", "elastic"])
def test_kustomize_builds_them(folder: str, tmp_path: Path) -> None:
    shutil.copytree(DEPLOY / "kubernetes", tmp_path / "kubernetes")
    (tmp_path / "kubernetes" / "base" / "token.env").write_text("AIOPS_TOKEN=secret\n")
    built = subprocess.run(
        ["kubectl", "kustomize", tmp_path / "kubernetes" / folder],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kinds = re.findall(r"^kind: (\w+)$", built, re.M)
    workers = "Job" if folder == "base" else "Deployment"
    assert sorted(kinds) == sorted(["NetworkPolicy", "Secret", "Service", "StatefulSet", workers])
    [secret] = set(
        re.findall(r"name: (aiops-token-\w+)$", built, re.M)
    )  # one, wherever it is named
    assert secret


def test_the_page_has_the_whole_table() -> None:
    text = PAGE.read_text()
    for launcher in (OVERRIDES, *LAUNCHERS):
        facts = ("rank", "workers", "local_rank", "local_workers", "host")
        for name in {name for fact in facts for name in getattr(launcher, fact)}:
            assert f"`{name}`" in text, f"{launcher.name}: {name}"


@pytest.mark.slow
def test_the_worker_ends_when_all_is_done_and_when_it_is_told() -> None:
    with ServerThread(policy="asgd") as server:
        environment = {**os.environ, "AIOPS_URL": server.url, "TRAIN_STEPS": "30"}

        def start() -> subprocess.Popen[str]:
            command = [sys.executable, str(DEPLOY / "train.py")]
            return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

        process = start()
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0
        assert out.startswith("from version 0 to 30, accuracy ")
        environment["TRAIN_STEPS"] = "0"
        process = start()
        while server.call(lambda running: running.engine.report()["version"]) < 40:
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 75
        assert out.startswith("from version 30 to ")
