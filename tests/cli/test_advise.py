"""``aiops advise``: what it prints, what it asks, and what it refuses."""

from __future__ import annotations

import json
import re
import sys

import pytest
import typer

from aiops.cli.advise import Asked, advise, number
from aiops.errors import UsageError
from tests.rows import each_row


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no line is broken


def test_options_answer_all_questions(capsys: pytest.CaptureFixture[str]) -> None:
    advise("transformer", "168k", workers=4, link="20Mbit/s", step=0.2, unequal=3.0)
    shown = capsys.readouterr().out
    assert re.match(r"export AIOPS_TOKEN=\$\(openssl rand -hex 16\)  # .*\naiops serve --p", shown)
    assert "\nAIOPS_OVERLAP=1 AIOPS_URL=aiops://SERVER:7171 python train.py\n" in shown
    assert "docs/guide-policies.md#unequal-workers" in shown
    assert "A step, of 672 kB at 2.5MB/s, computed and not measured:" in shown
    assert "raw, beside computing" in shown


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    advise("mlp", "268M", workers=2, step=0.1, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["job"]["nbytes"] == 4 * 268_000_000
    assert found["job"]["rate"] is None
    assert found["commands"] == [f"aiops run --workers 2 {' '.join(found['server'])} train.py"]
    assert found["reasons"][0]["measured"] == "docs/guide-policies.md#perceptron"
    assert found["unmeasured"]
    assert set(found["seconds_of_a_step"].values()) == {0.1}


def test_the_servers_link_is_the_workers_unless_it_is_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    seconds = []
    for server_link in (None, "1Gbit/s"):
        advise(
            "transformer", "1M", workers=4, link="20Mbit/s", server_link=server_link, as_json=True
        )
        seconds.append(json.loads(capsys.readouterr().out)["seconds_of_a_step"]["raw"])
    assert seconds == pytest.approx([0.1 + 4 * 1.6, 0.115 + 2 * 1.6])  # directions with it


def test_a_terminal_is_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(["transformer", "840k", 3, "local", 0.1, 2.0, True])
    asked = []

    def prompt(text: str, **_more: object) -> object:
        asked.append(text)
        return next(answers)

    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    advise()
    assert len(asked) == 7
    shown = capsys.readouterr().out
    assert shown.startswith("aiops run --workers 3 --policy schedule-free --state run train.py\n")


def test_without_a_terminal_what_has_no_default_is_named() -> None:
    with pytest.raises(UsageError, match="--workers is needed where nothing can be asked"):
        advise("mlp", "1M")
    assert Asked(terminal=False).ask("--step", None, "", 0.1, float) == 0.1


@each_row("text", ["many", "", "-5", "1.3T", "0", "1e9"])
def test_no_number_of_parameters(text: str) -> None:
    with pytest.raises(UsageError, match="is no number of parameters: write 840k"):
        number("--parameters", text)
