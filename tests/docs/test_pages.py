"""docs/algorithms is what the code says, and the plots show what was measured."""

from __future__ import annotations

import doctest
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from aiops.algorithms import BUILT_IN
from aiops.cli.policy_catalog import TOPICS
from aiops.errors import UsageError
from docs._tools.pages.__main__ import EXPERIMENTS, RESULTS, main, update
from docs._tools.pages.curves import TRANSFORMER, Curve, Curves
from docs._tools.pages.experiments import page
from docs._tools.pages.markdown import pages
from docs._tools.pages.plots import limits

DOCS = Path(__file__).parent.parent.parent / "docs"
FOLDER = DOCS / "algorithms"


def run(policy: str, seed: int, accuracy: float, **settings: Any) -> dict[str, Any]:
    curve = [[n * 1000, accuracy * n / 4, 1.0] for n in range(5)]
    made = {"policy": policy, "settings": settings, "seed": seed}
    return {**made, "curve": curve, "accuracy": accuracy}


def data(*runs: dict[str, Any]) -> dict[str, Any]:
    task = {"dataset": "mnist", "hidden": 200, "batch_size": 32, "epochs": 10, "workers": 4}
    return {"machine": {}, "task": task, "runs": list(runs)}


MEASURED = data(
    run("fasgd", 0, 0.96, lr=0.01),
    run("fasgd", 1, 0.98, lr=0.01),
    run("fasgd", 0, 0.2, lr=1.0),
    run("sasgd", 0, 0.95, lr=0.1),
    run("asgd", 0, 0.1),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "docs" / "algorithms"


def measure(folder: Path, text: str) -> None:
    path = folder.parent / RESULTS
    path.parent.mkdir(parents=True)
    path.write_text(text)


class TestUpToDate:
    def test_the_pages(self) -> None:
        committed = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.md")}
        made = pages(Curves.read(DOCS / RESULTS))
        assert set(committed) == set(made), "run `make docs`"
        for name, text in made.items():
            assert committed[name] == text, f"{name}: run `make docs`"

    def test_every_image_of_a_page_is_there_and_the_other_way_round(self) -> None:
        shown = {
            target
            for path in FOLDER.glob("*.md")
            for target in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
        }
        assert shown == {f"img/{path.name}" for path in FOLDER.glob("img/*")}


class TestPages:
    def test_one_for_each_and_one_for_what_they_share(self) -> None:
        names = {f"{name}.md" for name in (*BUILT_IN, *TOPICS)}
        assert set(pages()) == {"README.md", *names}

    def test_the_index_has_all(self) -> None:
        index = pages()["README.md"]
        for name in BUILT_IN:
            assert index.count(f"| [`{name}`]({name}.md) |") == 1

    @pytest.mark.parametrize("name", sorted(BUILT_IN))
    def test_its_parts_in_order(self, name: str) -> None:
        text = pages()[f"{name}.md"]
        headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
        assert headings[0] == "Settings"
        assert headings[-1] == "Neighbours"
        assert {"Source", "Example"} <= set(headings)
        assert text.startswith(f"# `{name}`\n")
        assert "```text\n" in text
        assert "math::" not in text
        assert "![" not in text
        assert re.search(rf"^\$ aiops serve --policy {name}\b", text, re.MULTILINE)

    @pytest.mark.parametrize("name", sorted(BUILT_IN))
    def test_its_example_runs_where_it_is_pasted(self, name: str) -> None:
        blocks = re.findall(r"```pycon\n(.*?)```", pages()[f"{name}.md"], re.DOTALL)
        test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, name, None, 0)
        assert len(test.examples) >= 2
        assert doctest.DocTestRunner().run(test).failed == 0

    @pytest.mark.parametrize("page", [None, "measured"])
    def test_tables_are_tables(self, page: str | None) -> None:
        for name, text in pages(Curves(MEASURED) if page else None).items():
            for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
                widths = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
                assert len(widths) == 1, f"{name}: {table}"


class TestMeasured:
    @pytest.mark.slow
    def test_pages_and_images(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        measure(folder, json.dumps(MEASURED))
        (folder / "img").mkdir(parents=True)
        (folder / "gone.md").write_text("of an algorithm that is no more")
        (folder / "img" / "gone.png").write_bytes(b"")
        monkeypatch.setattr(sys, "argv", ["pages", str(folder)])
        main()
        assert {path.name for path in folder.glob("*.md")} == set(pages())
        images = {path.name for path in folder.glob("img/*")}
        assert images == {"fasgd.png", "sasgd.png", "asgd.png"}
        for path in folder.glob("img/*"):
            assert path.read_bytes().startswith(b"\x89PNG")
            assert path.stat().st_size < 100_000
        text = (folder / "fasgd.md").read_text()
        assert "(img/fasgd.png)" in text
        assert "MNIST, 4 workers over TCP" in text
        assert "| [`fasgd`](fasgd.md) | `lr=0.01` | 97.00% | 96.00% to 98.00% |" in text
        assert "| [`asgd`](asgd.md) |  | 10.00% |  |" in text
        assert "![" not in (folder / "diloco.md").read_text()
        assert "## On the same task" in (folder / "README.md").read_text()

    def test_what_was_measured_on_a_transformer(self, folder: Path) -> None:
        measure(folder, json.dumps(MEASURED))
        row = {"seconds in all": "9.0", "mean τ": "7.0"}
        rows = [
            {**row, "policy": "asgd lr=0.001", "nats": "2.5"},
            {**row, "policy": "schedule-free lr=0.008", "nats": "1.5"},
        ]
        summary = folder.parent / RESULTS.parent / TRANSFORMER
        summary.parent.mkdir()
        summary.write_text(json.dumps({"table": rows}))
        curves = Curves.read(folder.parent / RESULTS)
        index = pages(curves)["README.md"].partition("## On a transformer")[2]
        assert "| [`schedule-free`](schedule-free.md) | `lr=0.008` | 1.5 | 9.0 | 7.0 |" in index
        assert index.index("schedule-free") < index.index("asgd")
        summary.write_text("{}")
        with pytest.raises(UsageError, match="does not hold learning curves"):
            Curves.read(folder.parent / RESULTS)

    def test_without_any(self, folder: Path) -> None:
        update(folder)
        assert {path.name: path.read_text() for path in folder.glob("*.md")} == pages()
        assert not (folder / "img").exists()

    @pytest.mark.parametrize(
        "text",
        ["{", "[]", '{"runs": [{}]}', json.dumps(data({**run("asgd", 0, 1.0), "curve": []}))],
    )
    def test_a_broken_file_says_so(
        self,
        text: str,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        measure(folder, text)
        with pytest.raises(UsageError, match=r"algorithms\.json does not hold learning curves"):
            Curves.read(folder.parent / RESULTS)
        monkeypatch.setattr(sys, "argv", ["pages", str(folder)])
        with pytest.raises(SystemExit):
            main()
        assert "make it again, or remove it" in capsys.readouterr().err


class TestCurves:
    def test_the_settings_that_ended_best(self) -> None:
        curve = Curves(MEASURED).of("fasgd")
        assert curve is not None
        assert curve.settings == {"lr": 0.01}
        assert (curve.seeds, curve.mean, curve.least, curve.most) == (2, 0.97, 0.96, 0.98)
        assert curve.samples == (0, 1000, 2000, 3000, 4000)
        assert curve.accuracies[-1] == (0.96, 0.98)
        assert Curves(MEASURED).of("diloco") is None

    def test_seeds_go_as_far_as_the_shortest(self) -> None:
        short = run("asgd", 1, 0.5)
        short["curve"] = short["curve"][:2]
        curve = Curves(data(run("asgd", 0, 0.5), short)).of("asgd")
        assert curve is not None
        assert curve.samples == (0, 1000)


class TestPlots:
    def test_a_curve_that_learnt_nothing_does_not_flatten_the_others(self) -> None:
        curves = Curves(MEASURED)
        shown = [curve for name in ("fasgd", "sasgd", "asgd") if (curve := curves.of(name))]
        low, high = limits(shown)
        assert 80 < low < 95
        assert 98 < high <= 100

    def test_one_point(self) -> None:
        low, high = limits([Curve("asgd", {}, (0,), ((0.0,),), (0.0,))])
        assert low < high


def test_the_page_about_experiments_is_what_they_say() -> None:
    committed = (DOCS / EXPERIMENTS).read_text(encoding="utf-8")
    assert committed == page(), "run `make docs`"


def test_no_underline_is_run_into_its_text() -> None:
    """A docstring that was wrapped together with a heading shows the heading's line as text."""
    for path in sorted(FOLDER.glob("*.md")):
        assert " ---- " not in path.read_text(encoding="utf-8"), path.name
