"""The page in a real browser: what it shows of 1,000 made-up workers, on a desk and on a phone.

``AIOPS_PICTURES=docs python -m pytest tests/dashboard/test_page.py`` also draws the pictures of
docs/guide-monitoring.md (``make pictures``).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from aiops.serving.config import Config
from aiops.serving.monitoring import Monitoring
from tests.dashboard.made_up import HOSTILE, MadeUpRun
from tests.support import PATIENCE, LoopThread

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="needs Chromium on the path"),
]

MS = 1000 * PATIENCE


class PageThread(LoopThread[Monitoring]):
    """The live page of a made-up run, with a history of some seconds."""

    def __init__(
        self, run: MadeUpRun, history: int = 0, port: int = 0, token: str | None = None
    ) -> None:
        super().__init__()
        self._token = token
        self._run_, self._history, self._port = run, history, port
        self._over: asyncio.Event | None = None

    def _end(self) -> None:
        assert self._over is not None
        self._over.set()

    async def _main(self) -> None:
        self._over = asyncio.Event()
        config = Config(dashboard=True, metrics_port=self._port or None, token=self._token)
        monitoring = Monitoring(config, lambda: self._run_)
        async with monitoring:
            page, now = monitoring._page, time.time()
            assert page is not None
            page._shares = self._run_  # type: ignore[assignment]
            page._board._about["since"] = now - self._history
            for k in range(self._history):
                page._board.take(self._run_.sample(now - self._history + k))
            self._begun(monitoring, monitoring.url)
            await self._over.wait()


def until(page: Any, expression: str) -> None:
    """Wait until an expression is true in a page; its policy forbids Playwright's own way."""
    deadline = time.monotonic() + PATIENCE
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def server() -> Iterator[PageThread]:
    with PageThread(MadeUpRun(1000, hostile=True), 30) as thread:
        yield thread


@pytest.fixture
def page(browser: Any, server: PageThread) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    requested: list[str] = []
    opened.on("request", lambda request: requested.append(request.url))
    opened.set_default_timeout(MS)
    opened.goto(server.url)
    until(opened, "aiopsPage.rows().size === 1000 && aiopsPage.drawn()")
    yield opened
    context.close()
    assert complaints == [], "the browser's console is empty: no error, nothing refused"
    here = [url for url in requested if url.startswith((server.url, "data:"))]
    assert requested == here, "nothing comes from elsewhere"


def test_a_thousand_workers(page: Any) -> None:
    until(page, "document.querySelectorAll('#view .row').length > 10")
    assert page.locator("#view .row").count() < 50, "those in view alone are elements"
    facts = page.locator("#facts").inner_text()
    assert "1,000" in facts
    assert page.locator("#ready").inner_text() == "takes pushes"
    assert page.locator("#connection").is_hidden()
    until(page, "document.querySelectorAll('.chart canvas').length === 5")
    assert page.locator("#h-logged").inner_text() == "Loss"
    page.get_by_role("button", name="accuracy", exact=True).first.click()
    assert page.locator("#h-logged").inner_text() == "Accuracy"
    assert "block0.mlp" in page.locator("#b-tensors").inner_text()
    assert page.locator("#h-tensors").inner_text() == "Norms of gradients"
    page.get_by_role("button", name="parameters").click()
    assert page.locator("#h-tensors").inner_text() == "Norms of parameters"
    assert "19.8" in page.locator("#b-tensors").inner_text()
    assert "kernel" in page.locator("#b-profile").inner_text()
    assert "budget" in page.locator("#f-traffic").inner_text()
    labels = page.locator("#c-updates").get_attribute("aria-label")
    assert labels.startswith("Chart: updates/s ")


def test_few_workers_have_a_line_each(browser: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiops.serving.live_page._EVERY", 0.1)
    context = browser.new_context()
    run = MadeUpRun(4, hostile=True)
    with PageThread(run) as thread:
        opened = context.new_page()
        opened.set_default_timeout(MS)
        opened.goto(thread.url)
        lines = "Object.keys(aiopsPage.series()).filter((name) => name.startsWith('of '))"
        until(opened, f"{lines}.length === 8 && aiopsPage.series()['of 4 loss'].at(-1) > 0")
        lengths = "new Set(Object.values(aiopsPage.series()).map((each) => each.length)).size"
        assert opened.evaluate(lengths) == 1
        labels = (
            "[...document.querySelectorAll('#c-logged .u-label')].map((each) => each.innerText)"
        )
        until(opened, f"{labels}.includes('worker-3')")
        assert HOSTILE in opened.evaluate(labels)
        assert opened.locator("#c-logged img").count() == 0
        run._left.add(3)
        until(opened, f"{lines}.length === 6 && !{labels}.includes('worker-3')")
        assert opened.evaluate(lengths) == 1
    context.close()


def test_many_workers_have_a_band_and_a_mean(page: Any) -> None:
    names = page.evaluate("Object.keys(aiopsPage.series())")
    assert "log loss" in names
    assert not [name for name in names if name.startswith("of ")]
    assert page.locator("#c-logged .u-label").count() == 4


def test_a_rate_is_from_answer_to_answer(page: Any) -> None:
    """Of a worker that pushes every 4 s, each other push refused; rows come every second."""
    rates = page.evaluate("""() => {
      const found = [], now = [...aiopsPage.rows().values()][1].answered;
      for (let k = 0; k < 40; k++) {
        const answered = now - 80 + 4 * Math.floor(k / 4), pushes = Math.floor(k / 8);
        aiopsPage.take([-1, "w", "worker", pushes, 0, 0, 0, 0, 0, answered, null, null, []]);
        found.push(aiopsPage.rows().get(-1).rate);
      }
      found.push(aiopsPage.rateOf(aiopsPage.rows().get(-1)));
      aiopsPage.rows().delete(-1);
      return found;
    }""")
    assert rates[:8] == [None] * 8, "it has not pushed twice"
    assert set(rates[8:40]) == {1 / 8}
    assert 0 < rates[40] < 3 / 40, "it is silent"


def test_the_list_is_filtered_and_sorted_by_the_keyboard(page: Any) -> None:
    page.locator("#filter").focus()
    page.keyboard.type("worker-77")
    until(page, "document.querySelectorAll('#view .row').length === 11")
    assert page.locator("#shown").inner_text().startswith("11 shown of 1,000")
    page.locator("#filter").fill("")
    page.get_by_role("columnheader", name="pushes").get_by_role("button").focus()
    page.keyboard.press("Enter")
    most = "Math.max(...[...aiopsPage.rows().values()].map((row) => row.pushes))"
    until(
        page,
        f"document.querySelector('#view .row :nth-child(8)').textContent === ({most})"
        ".toLocaleString('en')",
    )
    page.locator("#view").focus()
    page.keyboard.press("End")
    until(page, "document.querySelector('#view').scrollTop > 20000")
    until(page, "document.querySelector('#view .row[aria-rowindex=\"1001\"]') !== null")


def test_a_name_that_is_html_is_text(page: Any) -> None:
    page.locator("#filter").fill("<img")
    until(page, "document.querySelectorAll('#view .row').length === 1")
    assert page.locator("#view .row > div").first.inner_text() == HOSTILE
    assert page.locator("#view img").count() == 0
    assert page.title().startswith("aiops")


def test_an_administrator_removes_a_worker_after_a_question(browser: Any, page: Any) -> None:
    assert page.locator("#admin").is_hidden(), "this server has no tokens"
    context = browser.new_context()
    with PageThread(MadeUpRun(3), token="secret") as thread:
        opened = context.new_page()
        opened.set_default_timeout(MS)
        opened.goto(thread.url)
        opened.locator("#token").fill("secret")
        opened.locator("#unwanted").fill("worker-1")
        asked: list[str] = []
        opened.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        opened.locator("#remove").click()
        assert asked == ["Remove worker-1? It is not admitted again."]
        until(opened, "document.querySelectorAll('#view .row').length === 3")
        opened.locator("#view .row").nth(1).click()
        assert opened.locator("#unwanted").input_value() == "#2"
        opened.once("dialog", lambda dialog: (asked.append(dialog.message), dialog.dismiss()))
        opened.locator("#remove").click()
        assert asked[1] == "Remove #2, worker-1? It is not admitted again."
        opened.locator("#unwanted").fill("worker-1")
        assert opened.locator("#said").inner_text() == ""
        opened.once("dialog", lambda dialog: dialog.accept())
        opened.locator("#remove").press("Enter")
        until(opened, "document.querySelector('#said').textContent === 'root: remove worker-1'")
        opened.locator("#token").fill("wrong")
        opened.locator("#snapshot").click()
        until(opened, "document.querySelector('#said').textContent === 'there is no such token'")
    context.close()


def test_a_small_phone_needs_no_scrolling_to_the_side(page: Any) -> None:
    page.set_viewport_size({"width": 320, "height": 640})
    until(page, "document.querySelector('#c-updates canvas')?.clientWidth < 320")
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    assert page.locator("#head .extra").first.is_hidden()


def test_a_server_that_is_gone_is_said_and_it_goes_on(
    browser: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiops.serving.live_page._EVERY", 0.1)
    monkeypatch.setattr("aiops.serving.live_page._UNSEEN", 0.1)
    context = browser.new_context()
    opened = context.new_page()
    opened.set_default_timeout(MS)
    with PageThread(MadeUpRun(3)) as first:
        port = int(first.url.rsplit(":", 1)[1])
        opened.goto(first.url)
        until(opened, "aiopsPage.series().t.length > 1")
        before = opened.evaluate("aiopsPage.series().t[0]")
    opened.wait_for_selector("#connection:not([hidden])")
    assert "does not answer" in opened.locator("#connection").inner_text()
    with PageThread(MadeUpRun(3), port=port):
        opened.wait_for_selector("#connection", state="hidden")
        until(opened, "aiopsPage.rows().size === 3")
        assert opened.evaluate("aiopsPage.series().t[0]") == before, "it keeps what it had"
    context.close()


@pytest.mark.skipif("AIOPS_PICTURES" not in os.environ, reason="AIOPS_PICTURES names no folder")
@pytest.mark.parametrize(
    ("name", "width", "whole", "scheme"),
    [("live-page", 1280, True, "light"), ("live-page-phone", 390, False, "dark")],
)
def test_pictures(browser: Any, name: str, width: int, whole: bool, scheme: str) -> None:
    folder = Path(os.environ["AIOPS_PICTURES"])
    context = browser.new_context(
        viewport={"width": width, "height": 1000}, color_scheme=scheme, timezone_id="UTC"
    )
    with PageThread(MadeUpRun(48), 240) as thread:
        opened = context.new_page()
        opened.goto(thread.url)
        until(opened, "document.querySelectorAll('#view .row').length > 10")
        until(opened, "aiopsPage.series().t.length > 245")
        opened.screenshot(path=folder / f"{name}.png", full_page=whole)
    context.close()
