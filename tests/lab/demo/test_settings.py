"""The settings of a demo: defaults, and what is refused."""

from __future__ import annotations

import pytest

from aiops.algorithms import BUILT_IN
from aiops.errors import ConflictError, UsageError
from aiops.lab.demo.settings import RECIPES, DemoSettings
from aiops.lab.workloads import DATASETS
from tests.contract.cases import WITHOUT_GRADIENTS

POLICIES = set(BUILT_IN) - WITHOUT_GRADIENTS


def test_every_data_set_has_a_recipe() -> None:
    assert set(RECIPES) == set(DATASETS)
    for recipe in RECIPES.values():
        assert set(recipe.lr) <= POLICIES


@pytest.mark.parametrize("dataset", RECIPES)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_defaults_are_the_recipes(policy: str, dataset: str) -> None:
    settings = DemoSettings.make(policy=policy, dataset=dataset)
    recipe = RECIPES[dataset]
    assert (settings.steps, settings.batch_size) == (recipe.steps, recipe.batch_size)
    assert settings.lr == recipe.lr.get(policy)
    assert (settings.server.lr, settings.server.workers) == (settings.lr, 4)


def test_a_given_rate_wins_however_it_is_given() -> None:
    assert DemoSettings.make(lr=0.5).lr == 0.5
    by_set = DemoSettings.make(set=("lr=0.5", "gamma=0.9"))
    assert by_set.lr is None
    assert by_set.server.settings() == {"lr": "0.5", "gamma": "0.9"}


def test_a_policy_of_somebody_else_keeps_its_own_rate() -> None:
    settings = DemoSettings.make(policy="examples.custom_algorithm:Signum")
    assert settings.lr is None
    assert settings.server.lr is None


@pytest.mark.parametrize(("steps", "workers"), [(4, 4), (10, 4), (11, 3), (7, 1)])
def test_the_shares_are_even_and_make_up_the_whole(steps: int, workers: int) -> None:
    settings = DemoSettings.make(steps=steps, workers=workers)
    shares = [settings.share(index) for index in range(workers)]
    assert sum(shares) == steps
    assert max(shares) - min(shares) <= 1
    assert shares == sorted(shares, reverse=True)


def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(UsageError, match="--workers must be 1 to 64"):
        DemoSettings.make(workers=65)
    with pytest.raises(UsageError, match="--steps must be 4"):
        DemoSettings.make(steps=3)
    with pytest.raises(UsageError, match="average: the demo's workers push gradients"):
        DemoSettings.make(policy="average")
    with pytest.raises(ConflictError, match="n = 8 groups"):
        DemoSettings.make(policy="softsync", set=("n=8",))
