"""Advice: every job's command is one that the server takes, and what follows from the numbers."""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from aiops.algorithms import find
from aiops.cli.main import command
from aiops.client.strategies import no_overlap
from aiops.engine.engine import Engine
from aiops.errors import UsageError
from aiops.launch import advice
from aiops.launch.advice import EXCHANGES, KINDS, RULES, TOKEN, TrainingJob, advise
from aiops.serving.config import Config
from tests.rows import each_row

GUIDE = (Path(__file__).parents[2] / "docs" / "guide-policies.md").read_text(encoding="utf-8")

SIZES = (4_000, 3_360_000, 4_000_000_000)  # bytes
RATES = (None, 2.5e6, 1.25e8)
JOBS = [
    TrainingJob(kind, nbytes, workers, rate, rate, step, slowest, vanish)
    for kind, nbytes, workers, rate, step, slowest, vanish in itertools.product(
        KINDS, SIZES, (1, 4, 64), RATES, (0.001, 0.1, 10.0), (1.0, 3.0), (False, True)
    )
    if (nbytes, workers, rate, step) != (4_000_000_000, 64, 2.5e6, 0.001)
]
SLOW = TrainingJob("transformer", 672_000, 4, 2.5e6, step=0.05)


def config_of(line: str) -> Config:
    """Parse a command line of the server's as `aiops serve` does, or `aiops run`."""
    words = shlex.split(line)
    assert words[:2] in (["aiops", "serve"], ["aiops", "run"])
    flags = words[2:] if words[1] == "serve" else words[2:-1]
    found = command("serve").make_context("serve", flags)
    given: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in found.params.items()
        if getattr(found.get_parameter_source(name), "name", "") == "COMMANDLINE"
    }
    return Config(**given, token="of the environment")


def test_the_server_is_told_the_workers_from_which_on_it_collects() -> None:
    least = advice.COUNTED["schedule-free"]
    algorithm = find("schedule-free").make({})
    assert (algorithm.gathered(least - 1), algorithm.gathered(least)) == (1, 2)


def test_every_job_has_a_command_that_the_server_takes() -> None:
    seen = set[str]()
    for job in JOBS:
        found = advise(job)
        *token, server, worker = found.commands(job) if job.rate else found.commands(job) * 2
        assert token == [TOKEN] * (job.rate is not None)
        overlap = "AIOPS_OVERLAP=1 "
        assert worker.startswith(overlap) is found.overlap
        line = server.removeprefix(overlap)
        if line in seen:
            continue
        seen.add(line)
        config = config_of(line)
        algorithm = find(config.policy).make(config.settings())
        Engine(algorithm, config.options())
        plan = algorithm.plan(config.workers)
        assert not (found.overlap and no_overlap(plan)), line
    assert len(seen) > 10


def test_every_rule_is_of_use() -> None:
    used = {(advise(job).policy, advise(job).reasons[0].section) for job in JOBS}
    assert used == {(rule.policy, rule.section) for rule in RULES}


def test_every_reason_names_a_section_of_the_guide() -> None:
    headings = re.findall(r"^#+ (.*)$", GUIDE, re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}
    for job in JOBS:
        assert {reason.section for reason in advise(job).reasons} <= anchors


ROWS = re.findall(r"^\| (.+?) \| `(--kind.+?)` \| `(.+?)` \| (.*?) ?\|$", GUIDE, re.MULTILINE)


@each_row(("asked", "server", "workers"), [row[1:] for row in ROWS])
def test_a_row_of_the_guide_is_what_is_advised(
    asked: str, server: str, workers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command("advise")([*shlex.split(asked), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    *token, line = found["commands"][: 2 if "--link" in asked else 1]
    assert line == server
    assert all(text.startswith("export AIOPS_TOKEN=") for text in token)
    assert workers == "`AIOPS_OVERLAP=1`" * found["overlap"]


def test_the_guide_has_a_row_for_each_rule() -> None:
    assert len(ROWS) > len(RULES)
    for rule in RULES:
        flags = shlex.join(
            ["--policy", rule.policy, *(w for s in rule.settings for w in ("--set", s))]
        )
        assert any(flags in server for _job, _asked, server, _workers in ROWS)


class TestLinks:
    def test_on_one_machine_nothing_is_coded(self) -> None:
        found = advise(TrainingJob("transformer", 10**9, 4))
        assert (found.codec, found.overlap) == ("", False)
        assert found.commands(TrainingJob("transformer", 10**9, 4)) == [
            "aiops run --workers 4 --policy schedule-free train.py"
        ]

    @each_row(
        ("step", "codec", "overlap"),
        [(10.0, "", False), (0.5, "", True), (0.2, "int8", True), (0.05, "onebit", True)],
    )
    def test_the_slower_the_link_beside_computing_the_more_is_saved(
        self, step: float, codec: str, overlap: bool
    ) -> None:
        found = advise(TrainingJob("transformer", 672_000, 4, 2.5e6, step=step))
        assert (found.policy, found.codec, found.overlap) == ("schedule-free", codec, overlap)

    def test_the_servers_link_is_that_of_all(self) -> None:
        raw = EXCHANGES[1]
        assert raw.seconds(SLOW) == pytest.approx(2 * 672_000 / 2.5e6)
        shared = TrainingJob("transformer", 672_000, 4, 2.5e6, 2.5e6, step=0.05)
        assert raw.seconds(shared) == pytest.approx(4 * 672_000 / 2.5e6)

    @pytest.mark.parametrize(
        ("kind", "policy"), [("transformer", "schedule-free"), ("convnet", "diloco")]
    )
    def test_a_transformer_waits_for_a_link_rather_than_take_local_steps(
        self, kind: str, policy: str
    ) -> None:
        job = TrainingJob(kind, 672_000, 4, 2.5e6, step=0.01)
        assert 1.5 < EXCHANGES[-1].seconds(job) / job.step < 4
        found = advise(job)
        assert found.policy == policy
        assert found.overlap is (kind == "transformer")

    def test_an_exchange_that_no_codec_makes_fast_is_left_to_local_steps(self) -> None:
        job = TrainingJob("transformer", 400_000_000, 4, 2.5e6, step=0.5)
        found = advise(job)
        assert (found.policy, found.codec, found.overlap) == ("diloco", "int8", False)
        (local,) = [each for each in found.settings if each.startswith("local_steps=")]
        steps = int(local.partition("=")[2])
        coded = EXCHANGES[2].crossing(job)
        assert (steps - 1) * job.step < coded <= steps * job.step


class TestManyWorkers:
    def test_the_server_makes_directions_of_what_it_collects(self) -> None:
        few, many = (advise(TrainingJob("transformer", 672_000, n, step=0.5)) for n in (31, 32))
        assert few.settings == many.settings == ()
        assert "The server makes directions of the mean of 2 gradients" in many.reasons[1].text
        assert "31 ms apart" in many.reasons[1].text
        assert not any("directions" in each.text for each in few.reasons)
        raw = dict(many.steps)["raw"]
        assert raw == 0.5, "workers make none"
        assert dict(few.steps)["raw"] > raw

    def test_each_worker_makes_its_own_where_a_thread_of_the_server_cannot(self) -> None:
        """An update of 64 workers has 4 gradients, and comes every 62 ms."""
        fits, not_so = 0.031, 0.032  # seconds of directions: half of that, and more
        of = [int(4 * seconds / advice._OF_SERVER) for seconds in (fits, not_so)]
        jobs = [TrainingJob("transformer", nbytes, 64, step=1.0) for nbytes in of]
        assert [advise(job).settings for job in jobs] == [(), ("collect=1",)]
        found = advise(jobs[1])
        assert "a thread of the server 32 ms, and updates are 62 ms apart" in found.reasons[1].text
        assert dict(found.steps)["raw"] == pytest.approx(1.0 + jobs[1].directions)

    def test_what_has_no_directions_needs_no_maker(self) -> None:
        found = advise(TrainingJob("mlp", 636_000, 64, step=0.001))
        assert found.settings == ("orthogonal=false", "lr=0.003")
        assert len(found.reasons) == 1


def test_rows_of_tables_cross_raw() -> None:
    found = advise(TrainingJob("tables", 4_000_000, 4, 2.5e6, step=0.01))
    assert (found.codec, found.overlap) == ("", True)
    assert "3.2 s raw, beside computing" in found.reasons[1].text


class TestUnmeasured:
    def test_a_job_like_those_measured(self) -> None:
        assert advise(SLOW).unmeasured == ()

    @each_row(
        ("job", "text"),
        [
            (TrainingJob("transformer", 10**9, 4), "Models of more than 3.4 MB"),
            (TrainingJob("transformer", 1000, 17), "More than 16 workers"),
            (TrainingJob("transformer", 1000, 4, slowest=4), "more than 3 times as slow"),
            (TrainingJob("transformer", 10**8, 4, step=0.01), "375 ms of a thread"),
            (TrainingJob("mlp", 636_000, 4), "Perceptrons on large mini-batches"),
            (TrainingJob("tables", 1000, 4, 10**6), "Tables over slow links"),
        ],
    )
    def test_others(self, job: TrainingJob, text: str) -> None:
        assert text in " ".join(advise(job).unmeasured)


@each_row(
    ("wrong", "text"),
    [
        ({"kind": "gpt"}, "no kind is called 'gpt'"),
        ({"nbytes": 0}, "the bytes of the model must be from 1 to 4,503,599,627,370,496, not 0"),
        ({"workers": 0}, "^--workers must be from 1 to 1,000,000, not 0"),
        ({"slowest": 0.5}, "^--unequal, .* must be from 1 to 1,000,000, not 0.5"),
        ({"slowest": math.nan}, "^--unequal, .* must be from 1 to 1,000,000, not nan"),
        ({"slowest": math.inf}, "^--unequal, .* must be from 1 to 1,000,000, not inf"),
        ({"step": 0.0}, "^--step, .* must be from 0.000001 to 1,000,000, not 0"),
        ({"step": math.nan}, "^--step, .* must be from 0.000001 to 1,000,000, not nan"),
        ({"step": 2e6}, "^--step, .* must be from 0.000001 to 1,000,000, not 2,000,000"),
        ({"rate": -1.0}, "a link carries bytes"),
        ({"rate": math.inf}, "a link carries bytes"),
        ({"nbytes": 1 << 50, "rate": 1e3, "step": 1e-6}, "cannot carry this model"),
    ],
)
def test_jobs_that_cannot_be(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        advise(TrainingJob(**{"kind": "mlp", "nbytes": 1, "workers": 1, **wrong}))  # type: ignore[arg-type]
