"""What a release is made with: workflows, changelog, citation, and the page on the index."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from aiops import __version__
from aiops.algorithms import BUILT_IN
from tests.rows import each_row

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
SETTINGS: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT: dict[str, Any] = SETTINGS["project"]
BUILDS: dict[str, Any] = SETTINGS["tool"]["hatch"]["build"]["targets"]


def read(path: Path) -> dict[Any, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def steps(workflow: dict[Any, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


class TestWorkflows:
    def test_there_are_some(self) -> None:
        assert {path.stem for path in WORKFLOWS} >= {"ci", "wheel", "release"}

    @each_row("path", WORKFLOWS, ids=lambda path: path.stem)
    def test_actions_have_a_version_and_jobs_an_end(self, path: Path) -> None:
        workflow = read(path)
        assert True in workflow, "YAML reads `on` as true"
        assert workflow["permissions"] == {"contents": "read"}, "a job asks for more"
        for job in workflow["jobs"].values():
            if called := job.get("uses"):
                assert (ROOT / called).is_file()
            else:
                assert job["timeout-minutes"] <= 60
        for step in steps(workflow):
            if action := step.get("uses"):
                assert re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", action), action
                if action.startswith("actions/checkout@"):  # what runs later finds no token
                    assert step["with"]["persist-credentials"] is False

    @each_row("path", WORKFLOWS, ids=lambda path: path.stem)
    def test_what_they_run_is_there(self, path: Path) -> None:
        for name in re.findall(r"(?<![\w/])(\.ci/\w+(?:\.py)?)\b", path.read_text()):
            assert (ROOT / name).is_file(), name

    def test_the_wheel_is_tried_on_every_python_that_it_names(self) -> None:
        matrix = read(ROOT / ".github" / "workflows" / "wheel.yml")["jobs"]["try"]["strategy"]
        named = [text.rpartition(" ")[2] for text in PROJECT["classifiers"] if ":: 3." in text]
        assert matrix["matrix"]["python"] == named
        assert {name.partition("-")[0] for name in matrix["matrix"]["os"]} == {"ubuntu", "macos"}

    def test_wheels_with_compiled_code_are_for_the_machines_that_it_is_tried_on(self) -> None:
        jobs = read(ROOT / ".github" / "workflows" / "wheel.yml")["jobs"]
        built = set(jobs["compiled"]["strategy"]["matrix"]["os"])
        assert built == {"ubuntu-24.04", "ubuntu-24.04-arm", "macos-15", "macos-15-intel"}
        # Of Numba there are no wheels for new Pythons on Macs of Intel: no server is tried there.
        assert set(jobs["try"]["strategy"]["matrix"]["os"]) == built - {"macos-15-intel"}
        chosen = SETTINGS["tool"]["cibuildwheel"]
        assert (chosen["build"], chosen["environment"]) == ("cp311-*", {"AIOPS_COMPILED": "1"})
        [program] = re.findall(r"\{project\}/(\S+)", chosen["test-command"])
        assert (ROOT / program).is_file()

    def test_all_that_is_built_is_tried_and_published(self) -> None:
        folder = ROOT / ".github" / "workflows"
        wheel, release = read(folder / "wheel.yml"), read(folder / "release.yml")

        def artifacts(job: dict[str, Any], action: str) -> list[dict[str, Any]]:
            return [s["with"] for s in job["steps"] if s.get("uses", "").startswith(action)]

        for name in ("build", "compiled"):
            [kept] = artifacts(wheel["jobs"][name], "actions/upload-artifact@")
            assert kept["name"].startswith("dist-")
        whole = {"pattern": "dist-*", "merge-multiple": True, "path": "dist/"}
        taking = [wheel["jobs"]["try"], wheel["jobs"]["mixed"]]
        for job in (*taking, release["jobs"]["publish"], release["jobs"]["page"]):
            assert artifacts(job, "actions/download-artifact@") == [whole]
        assert [job["needs"] for job in taking] == [["build", "compiled"]] * 2

    def test_what_may_write_runs_last_and_does_one_thing(self) -> None:
        jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
        allowed = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
        assert allowed == {
            "publish": {"id-token": "write", "attestations": "write", "contents": "read"},
            "page": {"contents": "write"},
        }
        assert [jobs[name]["needs"] for name in ("test", "publish", "page")] == [
            *("check", "test", "publish")
        ]

    def test_a_release_has_passed_what_main_passes(self) -> None:
        folder = ROOT / ".github" / "workflows"
        assert read(folder / "release.yml")["jobs"]["test"]["uses"] == "./.github/workflows/ci.yml"
        ci = read(folder / "ci.yml")
        assert "workflow_call" in ci[True]
        assert {"test", "wheel"} <= set(ci["jobs"]), "of both, and what it builds is published"

    def test_every_command_of_make_is_one_whatever_files_there_are(self) -> None:
        text = (ROOT / "Makefile").read_text()
        phony = set(re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE)[0].split())
        assert phony == set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))


@each_row("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_template_of_issues(path: Path) -> None:
    content = read(path)
    if path.stem == "config":
        return
    assert {"name", "description", "body"} <= set(content)
    for field in content["body"]:
        assert field["type"] in ("markdown", "textarea", "input", "dropdown", "checkboxes")
        assert ("value" if field["type"] == "markdown" else "label") in field["attributes"]
        assert field["type"] == "markdown" or field["id"]


def test_the_citation() -> None:
    citation = read(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert (citation["version"], citation["license"]) == (__version__, PROJECT["license"])
    cited: set[str] = set()
    for paper in citation["references"]:
        assert {"type", "title", "authors", "year"} <= set(paper)
        for author in paper["authors"]:
            assert author.keys() in ({"name"}, {"given-names", "family-names"})
        cited |= set(paper["notes"].split(", "))
    assert cited <= set(BUILT_IN)
    assert set(BUILT_IN) - cited == {"hardsync", "no-delay"}, (
        "many have it; a paper without authors"
    )


def test_the_changelog_has_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[([^\]]+)\]", text, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert __version__ in text


def test_the_source_distribution_has_what_its_build_reads() -> None:
    included = set(BUILDS["sdist"]["include"])
    assert {path.name for path in ROOT.glob("*.md")} <= included, "hatch_build.py reads the README"
    assert {name for name in included if not (ROOT / name).exists()} == set()


@pytest.mark.parametrize("target", ["wheel", "sdist"])
def test_the_metadata_are_of_a_version_that_tools_know(target: str) -> None:
    """Without one it is the newest of the build's backend, which an index may not take yet."""
    assert BUILDS[target]["core-metadata-version"] == "2.4"


class TestPageOnTheIndex:
    @pytest.fixture
    def hook(self, monkeypatch: pytest.MonkeyPatch) -> Any:
        pytest.importorskip("hatchling")
        monkeypatch.syspath_prepend(str(ROOT))
        import hatch_build

        return hatch_build

    def test_every_link_leads_to_a_file_of_the_repository(self, hook: Any) -> None:
        url = "https://example.org/o/r"
        text = hook.absolute((ROOT / "README.md").read_text(), url, "v1")
        prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
        targets = re.findall(r"\]\(([^)\s]+)\)", prose)
        assert len(targets) > 30
        for target in targets:
            kind, _, path = target.removeprefix(f"{url}/").partition("/v1/")
            if kind in ("raw", "blob"):
                assert (ROOT / path.partition("#")[0]).exists(), target
                assert (kind == "raw") == path.endswith(".png")
            else:
                assert "://" in target, "relative links lead nowhere there"

    @pytest.mark.parametrize(
        ("text", "becomes"),
        [
            ("[a](b.md#c)", "[a](U/blob/v/b.md#c)"),
            ("![a](b.png)", "![a](U/raw/v/b.png)"),
            ("[a](#c) [a](https://b)", "[a](#c) [a](https://b)"),
            ("```\nx = [a](b)\n```", "```\nx = [a](b)\n```"),
        ],
    )
    def test_of_a_link(self, text: str, becomes: str, hook: Any) -> None:
        assert hook.absolute(text, "U", "v") == becomes

    def test_the_place_is_that_of_the_workflow(self, hook: Any) -> None:
        assert hook.repository({}) is None
        given = {"GITHUB_REPOSITORY": "o/r", "GITHUB_SHA": "abc", "GITHUB_REF_NAME": "v1"}
        assert hook.repository(given) == ("https://github.com/o/r", "abc")
        assert hook.repository({**given, "GITHUB_REF_TYPE": "tag"})[1] == "v1"
