"""docs/frameworks: the lines shown are the examples', the settings those that were measured."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from aiops.algorithms import find
from aiops.launch.advice import KINDS
from aiops.serving.config import Config
from docs._tools.site.pages import BELOW
from examples.frameworks import __main__ as frameworks
from tests.launch.test_advice import config_of
from tests.support import Process

DOCS = Path(__file__).parents[2] / "docs"
GUIDE = (DOCS / "guide-frameworks.md").read_text("utf-8")
POLICIES = (DOCS / "guide-policies.md").read_text("utf-8")
EXAMPLES = sorted(frameworks.HERE.glob("[!_]*.py"))
PAGES = {path: path.read_text("utf-8") for path in sorted((DOCS / "frameworks").glob("*.md"))}
MEASURED = {  # the rows of the guide that have a job on one machine
    "transformer": "a transformer, on one machine",
    "convnet": "a convolutional network",
    "tables": "sparse tables",
}
PARTS = ["The changed lines", "Settings", "What was measured", "What to mind"]

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def example_of(page: Path) -> Path:
    [name] = re.findall(r"^```python (\w+\.py)$", PAGES[page], re.MULTILINE)
    return frameworks.HERE / str(name)


def run_line(page: Path) -> str:
    [line] = re.findall(r"^\$ (aiops run .*)$", PAGES[page], re.MULTILINE)
    return str(line)


def advice(page: Path) -> tuple[str, str]:
    """Return the command that asks for advice, and the answer shown."""
    [found] = re.findall(r"^\$ (aiops advise .*)\n(aiops .*)$", PAGES[page], re.MULTILINE)
    return found[0], found[1]


def settings(config: Config) -> tuple[str, dict[str, object]]:
    """Return the policy and all that is set of it, and no rate."""
    values = config.settings()
    if config.policy != "schedule-free":  # the rate of another rule is the model's own
        values.pop("lr", None)
    return config.policy, dict(find(config.policy).make(values).settings())


def test_each_example_has_a_page() -> None:
    assert sorted(example_of(page) for page in PAGES) == EXAMPLES


@by_page
def test_a_page_is_found(page: Path) -> None:
    path = f"frameworks/{page.name}"
    example = example_of(page)
    row = re.search(rf"^\| \[[^]]+\]\({path}\) \| \[{example.stem}\]\(.*\| (\d) \|$", GUIDE, re.M)
    assert row is not None, "the table of guide-frameworks.md"
    assert int(row[1]) == len(frameworks.marked(example.read_text("utf-8")))
    assert f"(docs/{path})" in (DOCS.parent / "README.md").read_text("utf-8")
    assert page.relative_to(DOCS).match(BELOW["guide-frameworks"])


@by_page
def test_a_page_is_short_and_has_its_parts(page: Path) -> None:
    text = PAGES[page]
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == PARTS
    assert len(text.splitlines()) <= 110
    assert "$ pip install 'aiops-ps[server," in text


@by_page
def test_the_lines_are_those_that_the_example_marks(page: Path) -> None:
    example = example_of(page)
    shown = re.search(rf"```python {example.name}\n(.*?)```", PAGES[page], re.DOTALL)
    assert shown is not None
    assert shown[1].splitlines() == frameworks.marked(example.read_text("utf-8"))


@by_page
def test_the_command_is_that_of_the_example(page: Path) -> None:
    text = example_of(page).read_text("utf-8")
    command = re.search(r"aiops run .*?\.py$", text, re.DOTALL | re.MULTILINE)
    assert command is not None
    assert run_line(page).split() == command[0].replace("\\\n", " ").split()


@by_page
def test_the_settings_are_those_that_are_advised_and_that_the_guide_measured(page: Path) -> None:
    asked, answer = advice(page)
    advised = config_of(answer)
    assert settings(config_of(run_line(page))) == settings(advised)
    flags = shlex.split(asked)
    kind = flags[flags.index("--kind") + 1]
    assert kind in KINDS
    if kind not in MEASURED:
        assert "The guide measured no such model" in PAGES[page]
        return
    row = re.search(rf"^\| {MEASURED[kind]} \|.*`(aiops run .*)` \|", POLICIES, re.MULTILINE)
    assert row is not None
    assert answer == row[1].replace("--workers 4", "--workers 2")


@pytest.mark.slow
@by_page
def test_the_advice_is_what_the_command_says(page: Path) -> None:
    asked, answer = advice(page)
    status, out, err = Process("-m", *shlex.split(asked)).end()
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == answer
