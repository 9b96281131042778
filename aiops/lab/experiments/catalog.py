"""The experiments by name."""

from __future__ import annotations

from collections.abc import Mapping

from aiops.errors import UsageError, nearest
from aiops.lab.experiments.experiment import Experiment
from aiops.lab.experiments.papers import (
    all_policies,
    average_codecs,
    b_staleness,
    bfasgd_budget,
    bfasgd_coin,
    bfasgd_fetch,
    bfasgd_push,
    elastic_clients,
    fasgd_clients,
    fasgd_staleness,
    model_average_straggler,
    no_delay_discrepancy,
    no_delay_scaling,
    one_rule,
    poisoned_workers,
    softsync_cifar10,
    softsync_speedup,
    softsync_staleness,
    sync_waste,
    which_policy,
)

EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        fasgd_staleness.EXPERIMENT,
        fasgd_clients.EXPERIMENT,
        bfasgd_fetch.EXPERIMENT,
        bfasgd_push.EXPERIMENT,
        bfasgd_coin.EXPERIMENT,
        bfasgd_budget.EXPERIMENT,
        softsync_staleness.EXPERIMENT,
        softsync_cifar10.EXPERIMENT,
        softsync_speedup.EXPERIMENT,
        no_delay_scaling.EXPERIMENT,
        b_staleness.EXPERIMENT,
        elastic_clients.EXPERIMENT,
        sync_waste.EXPERIMENT,
        no_delay_discrepancy.EXPERIMENT,
        model_average_straggler.EXPERIMENT,
        average_codecs.EXPERIMENT,
        all_policies.EXPERIMENT,
        poisoned_workers.EXPERIMENT,
        one_rule.EXPERIMENT,
        which_policy.EXPERIMENT,
    )
}
"""All that there are, in the order in which one would read them."""


def find(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises
    ------
    UsageError
        When there is none of that name, with the nearest.
    """
    found = EXPERIMENTS.get(name)
    if found is None:
        raise UsageError(f"no experiment is called {name!r}; {nearest(name, EXPERIMENTS)}")
    return found
