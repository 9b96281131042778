"""What is said of an algorithm is what it does."""

from __future__ import annotations

import dataclasses

from aiops.algorithms import find
from aiops.algorithms.base import Algorithm
from aiops.cli.policy_catalog import (
    FAMILIES,
    OWN,
    built_in,
    command,
    facts,
    families,
    family,
    grouped,
    neighbours,
)
from tests.rows import each_row

NAMES = sorted(built_in())


@each_row(
    ("name", "waits_for", "worker", "memory"),
    [
        ("asgd", "no worker", "pushes each gradient", "0"),
        ("hardsync", "all workers", "pushes each gradient", "1: a sum"),
        ("ssp", "the slowest, when 4 steps ahead", "pushes each gradient", "0"),
        ("fasgd", "no worker", "pushes each gradient", "3: n, b, v"),
        ("softsync", "no worker", "pushes each gradient", "1: a sum"),
    ],
)
def test_facts(name: str, waits_for: str, worker: str, memory: str) -> None:
    found = facts(find(name))
    assert (found.waits_for, found.worker, found.memory) == (waits_for, worker, memory)


def test_facts_of_those_whose_workers_train() -> None:
    assert "summed gradients every 5 steps" in facts(find("downpour")).worker
    assert "(adamw), pushes its change every 20 steps" in facts(find("diloco")).worker
    assert "towards the centre every 10 steps" in facts(find("easgd")).worker
    assert "up to 8 steps" in facts(find("no-delay")).waits_for
    assert "versions that workers hold" in facts(find("dcasgd")).memory


@each_row("name", NAMES)
def test_it_is_of_a_family_and_has_neighbours(name: str) -> None:
    kind = find(name)
    assert family(kind) in FAMILIES
    compared = neighbours(kind)
    assert 2 <= len(compared) <= 4
    assert len(set(compared) - {name}) == len(compared)
    assert set(compared) <= set(NAMES)


@each_row("name", NAMES)
def test_the_command_works(name: str) -> None:
    workers = 4 if command(name, find(name)).endswith(" --workers N") else None
    find(name)().check(workers)


@each_row("name", NAMES)
def test_every_setting_is_in_one_group_with_a_meaning(name: str) -> None:
    kind = find(name)
    groups = grouped(kind)
    settings = [setting for group in groups for setting in group.settings]
    assert sorted(s.name for s in settings) == sorted(f.name for f in dataclasses.fields(kind))
    assert all(setting.meaning for setting in settings)
    assert not any(setting.meaning.lower().endswith("see below.") for setting in settings)
    assert (groups[0].title, groups[0].settings[0].name) == (OWN, "lr")
    assert kind.make({s.name: s.default for s in settings}) == kind()


def test_what_a_page_only_points_to_is_explained_where_it_points() -> None:
    groups = {group.title: group.settings for group in grouped(find("fedbuff"))}
    assert [s.name for s in groups[OWN]] == ["lr", "k"]
    modulate = groups["Modulation for staleness"][0]
    assert (modulate.name, modulate.default) == ("modulate", "polynomial")
    assert "exponential" in modulate.meaning


def test_families_of_others_come_last() -> None:
    class Mine(Algorithm):
        name = "mine"

    found = families({"asgd": find("asgd"), "aaa": Mine, "hardsync": find("hardsync")})
    assert list(found) == ["synchronous or bounded", "asynchronous", "other"]
    assert found["other"] == ["aaa"]
