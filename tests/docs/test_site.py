"""The site has all pages, and their links lead where they did."""

from __future__ import annotations

import json
from pathlib import Path

from docs._tools.site import versions
from docs._tools.site.links import OUTSIDE, of_site
from docs._tools.site.pages import BELOW, SECTIONS
from tests.rows import each_row

ROOT = Path(__file__).parents[2]
PAGES = frozenset({"readme.md", "guide-ray.md", "results/README.md", "wire.md", "live-page.png"})


def test_every_page_is_in_the_menu_once() -> None:
    docs = ROOT / "docs"
    listed = [f"{page}.md" for pages in SECTIONS.values() for page in pages]
    below = {path for pattern in BELOW.values() for path in docs.glob(pattern)}
    below -= {docs / page for page in listed}
    listed += [path.relative_to(docs).as_posix() for path in below]
    here = [path.relative_to(docs) for path in docs.rglob("*.md")]
    wanted = {path.as_posix() for path in here if path.parts[0] != "_tools"}
    assert len(listed) == len(set(listed))
    assert set(listed) == wanted | {*OUTSIDE.values(), "reference/index.md"}


@each_row(
    ("path", "link", "there"),
    [
        ("README.md", "[ray](docs/guide-ray.md#tune)", "[ray](guide-ray.md#tune)"),
        ("README.md", "[all](docs/results)", "[all](results/README.md)"),
        ("README.md", "[an example](examples/gpt.py)", "[an example](B/examples/gpt.py)"),
        ("README.md", "![page](docs/live-page.png)", "![page](live-page.png)"),
        ("docs/wire.md", "[first](../README.md)", "[first](readme.md)"),
        ("docs/results/README.md", "[wire](../wire.md#a)", "[wire](../wire.md#a)"),
        ("docs/results/README.md", "[code](../../aiops/x.py)", "[code](B/aiops/x.py)"),
        ("docs/wire.md", "[`a[b]` and c](guide-ray.md)", "[`a[b]` and c](guide-ray.md)"),
        ("docs/wire.md", "[here](#part)", "[here](#part)"),
        ("docs/wire.md", "[far](https://a.b/docs/c.md)", "[far](https://a.b/docs/c.md)"),
        ("docs/wire.md", "```\n[no](../README.md)\n```", "```\n[no](../README.md)\n```"),
    ],
)
def test_links(path: str, link: str, there: str) -> None:
    assert of_site(f"a {link} b", path, PAGES, "B") == f"a {there} b" or "```" in link
    assert of_site(link, path, PAGES, "B") == there


def test_links_to_a_repository_that_is_not_known_are_text() -> None:
    assert of_site("see [gpt](../examples/gpt.py).", "docs/wire.md", PAGES, "") == "see gpt."


def test_versions_lie_beside_each_other(tmp_path: Path) -> None:
    for name in ("dev", "0.2.0", "0.10.0", "0.9.1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "index.html").touch()
    versions.write(tmp_path)
    assert "url=0.10.0/index.html" in (tmp_path / "index.html").read_text()
    text = (tmp_path / "versions.html").read_text()
    at = [text.index(f">{name}<") for name in ("0.10.0", "0.9.1", "0.2.0", "dev")]
    assert at == sorted(at)
    listed = json.loads((tmp_path / "versions.json").read_text())
    assert listed == ["0.10.0", "0.9.1", "0.2.0", "dev"]
