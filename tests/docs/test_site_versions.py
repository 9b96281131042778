"""The list of versions in the side bar of the site, in a real browser."""

from __future__ import annotations

import functools
import http.server
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from docs._tools.site import versions

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path"),
]

SITE = Path(__file__).parents[2] / "docs" / "_tools" / "site"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Sites of three versions, each of two pages, as Sphinx makes them around the template."""
    template = (SITE / "_templates" / "versions.html").read_text(encoding="utf-8")
    made = template.partition("-#}")[2]
    for name in ("0.1.0", "0.2.0", "dev"):
        for page, root in (("index.html", "./"), ("deep/page.html", "../")):
            file = tmp_path / "aiops" / name / page
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(
                f'<!doctype html><html data-content_root="{root}"><link rel="icon" href="data:,">'
                f'<script defer src="{root}versions.js"></script>{made}</html>',
                encoding="utf-8",
            )
        shutil.copy(SITE / "_static" / "versions.js", tmp_path / "aiops" / name)
    versions.write(tmp_path / "aiops")
    return tmp_path


@pytest.fixture
def url(site: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_given: object) -> None:
            pass

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def opened(browser: Any, url: str) -> tuple[Any, list[str]]:
    """Return a page and what went wrong in it, when nothing is to come any more."""
    page, wrong = browser.new_page(), list[str]()
    page.on("console", lambda said: wrong.append(said.text))
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.goto(url, wait_until="networkidle")
    return page, wrong


@pytest.mark.parametrize("where", ["index.html", "deep/page.html"])
def test_versions_are_listed_on_every_page(where: str, url: str, browser: Any) -> None:
    page, wrong = opened(browser, f"{url}/aiops/0.1.0/{where}")
    links = page.locator("#versions a")
    assert links.all_inner_texts() == ["0.2.0", "0.1.0", "dev"]
    assert page.locator("#versions").is_visible()
    assert page.locator("#versions .current-page").all_inner_texts() == ["0.1.0"]
    links.last.click()
    page.wait_for_url(f"{url}/aiops/dev/index.html")
    assert wrong == []
    page.close()


def test_from_files_there_is_no_list_and_no_error(site: Path, browser: Any) -> None:
    page, wrong = opened(browser, (site / "aiops" / "dev" / "deep" / "page.html").as_uri())
    assert page.locator("#versions").is_hidden()
    assert wrong == []
    page.close()


def test_a_version_alone_has_no_list(site: Path, url: str, browser: Any) -> None:
    (site / "aiops" / "versions.json").unlink()
    page, wrong = opened(browser, f"{url}/aiops/dev/index.html")
    assert page.locator("#versions").is_hidden()
    assert [text for text in wrong if "404" not in text] == []  # which the browser notes itself
    page.close()
