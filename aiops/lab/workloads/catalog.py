"""Data sets by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from aiops.errors import UsageError, nearest
from aiops.lab.workloads.blobs import synthetic
from aiops.lab.workloads.cifar10 import load_cifar10
from aiops.lab.workloads.dataset import Dataset
from aiops.lab.workloads.digits import load_digits
from aiops.lab.workloads.mnist import load_mnist

__all__ = ["DATASETS", "load"]

_LOADERS: Mapping[str, Callable[[Path | None, bool], Dataset]] = {
    "digits": lambda _cache, _download: load_digits(),
    "mnist": lambda cache, download: load_mnist(cache=cache, download=download),
    "cifar10": lambda cache, download: load_cifar10(cache=cache, download=download),
    "synthetic": lambda _cache, _download: synthetic(),
}

DATASETS: tuple[str, ...] = tuple(_LOADERS)
"""The names of the data sets."""


def load(name: str, *, cache: Path | None = None, download: bool = True) -> Dataset:
    """Return a data set by name.

    ``digits`` ships with the package and ``synthetic`` is computed (:func:`synthetic` makes other
    sizes). ``mnist`` and ``cifar10`` are looked for in ``$AIOPS_DATA/<name>``, then in the cache,
    and otherwise downloaded into the cache and checked.

    Args:
        name: one of :data:`DATASETS`.
        cache: the folder of downloaded data sets; default ``$XDG_CACHE_HOME/aiops/data``, or
            ``~/.cache/aiops/data``.
        download: whether missing files may be downloaded (mnist: 12 MB, cifar10: 170 MB).

    Raises:
        UsageError: there is no such data set.
        DataUnavailable: its files are not here and could not be, or were not to be, downloaded.
        DamagedData: one of its files is corrupt.
    """
    loader = _LOADERS.get(name)
    if loader is None:
        raise UsageError(f"no data set is called {name!r}; {nearest(name, DATASETS)}", name=name)
    return loader(cache, download)
