"""Give some tensors other settings than the rest, as the parameter groups of PyTorch do.

``--set weight_decay=0.1 --set weight_decay=0@*norm*,*bias``: a value, ``@``, and patterns of names
of tensors and tables, in which ``*`` stands for any characters, ``?`` for one, and ``[ab]`` for one
of these. Of several values for a tensor the last counts, and a value without a pattern is for all
tensors that have no other.

======================  ======================================================================
setting                 it may differ under
======================  ======================================================================
``lr``                  all policies but ``average``, ``eamsgd`` and ``gap-aware``. The schedule
                        multiplies each value. A tensor with 0 keeps its values.
``weight_decay``        ``schedule-free``, and policies whose server has one of the optimisers; not
                        ``diloco`` with ``mode=async``
``clip``                all policies whose server is sent gradients, or changes of a model; not
                        ``average``, ``easgd``, ``eamsgd`` and ``no-delay``
``inner_lr``            ``diloco`` and ``fedbuff``, whose workers have an optimiser of their own
``inner_weight_decay``  the same
``inner_clip``          the same
======================  ======================================================================

``--set clip=1 --set clip=0.1@embed*,head* --set clip=0@*bias``: the tensors that have one of the
values form a group. Its gradient is scaled down if the norm over the tensors of the group is larger
than the value, as `torch.nn.utils.clip_grad_norm_` scales a parameter group. To clip two tensors
each by itself give each a value. All tensors without a pattern form one more group. With 0 a group
is not clipped.

An algorithm keeps all of them as one text, its setting ``per_tensor``, which ``aiops stats`` shows
as they were written: ``weight_decay=0@*norm*,*bias lr=0.001@embed*``. A pattern that matches no
tensor is refused when the model is defined, and the error names the nearest. Steps that a worker
takes locally until its next fetch (`downpour`, `ssp`) have the same rates as on the server; those
of a gate (``local``) have that gate's one rate.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from aiops.common.patterns import unmatched
from aiops.errors import UsageError
from aiops.kernels.clipping import Clip

SETTING = "per_tensor"
"""The setting that keeps all values with patterns."""


@dataclass(frozen=True)
class Clause:
    """One value of a setting, for the tensors whose names match one of the patterns."""

    setting: str
    value: float
    patterns: tuple[str, ...]

    def matches(self, tensor: str) -> bool:
        """Return whether the value is for the tensor of this name."""
        return any(fnmatchcase(tensor, pattern) for pattern in self.patterns)

    def __str__(self) -> str:
        value = repr(self.value).removesuffix(".0")
        return f"{self.setting}={value}@{','.join(self.patterns)}"


@dataclass(frozen=True)
class PerTensor:
    """The values with patterns of an algorithm, or of a worker's own optimiser.

    Example
    -------
    >>> found = PerTensor.of("weight_decay=0@*norm*,*bias lr=0.001@embed*")
    >>> found.value("weight_decay", "layer1.bias", 0.1), found.value("lr", "layer1.bias", 0.01)
    (0.0, 0.01)
    """

    clauses: tuple[Clause, ...] = ()

    @staticmethod
    @functools.lru_cache(maxsize=64)
    def of(text: str) -> PerTensor:
        """Return the values in a text.

        Raises
        ------
        UsageError
            When one is not written as a setting, a value of 0 or more, and patterns.
        """
        return PerTensor(tuple(_clause(item) for item in text.split()))

    def __str__(self) -> str:
        return " ".join(map(str, self.clauses))

    def has(self, setting: str) -> bool:
        """Return whether a setting has a value with a pattern."""
        return any(clause.setting == setting for clause in self.clauses)

    def value(self, setting: str, tensor: str, other: float) -> float:
        """Return a setting's value for the tensor of a name; ``other``: without a pattern."""
        counts = self._clause(setting, tensor)
        return other if counts is None else self.clauses[counts].value

    def clip(self, other: float, tensors: Sequence[str]) -> Clip | None:
        """Return the groups of tensors that ``clip`` makes, of a model or of a part of it.

        Parameters
        ----------
        other
            The largest norm of all tensors that have no other; 0: any.
        tensors
            Their names.

        Returns
        -------
        Clip or None
            Of these tensors, in this order; None: no norm has a limit.
        """
        clauses = [number for number, each in enumerate(self.clauses) if each.setting == "clip"]
        limits = (other, *(self.clauses[number].value for number in clauses))
        if not any(limits):
            return None
        if not clauses:
            return Clip(limits)
        found = [self._clause("clip", tensor) for tensor in tensors]
        groups = [0 if each is None else 1 + clauses.index(each) for each in found]
        return Clip(limits, np.array(groups, np.int64))

    def _clause(self, setting: str, tensor: str) -> int | None:
        """Return the number of the clause that counts for a tensor; None: there is none."""
        for number in reversed(range(len(self.clauses))):
            clause = self.clauses[number]
            if clause.setting == setting and clause.matches(tensor):
                return number
        return None

    def renamed(self, names: Mapping[str, str]) -> PerTensor:
        """Return the values of some settings alone, each under a new name."""
        kept = (clause for clause in self.clauses if clause.setting in names)
        return PerTensor(tuple(Clause(names[c.setting], c.value, c.patterns) for c in kept))

    def unmatched(self, tensors: Sequence[str]) -> str | None:
        """Return which pattern matches none of a model's tensors, in words; None: each does."""
        given = ((each, f"--set {clause}") for clause in self.clauses for each in clause.patterns)
        return unmatched(given, tensors)


def literal(name: str) -> str:
    """Return a pattern for a name alone (or one like it, if it has a comma or a space).

    >>> literal("emb[0]"), literal("a b")
    ('emb[[]0]', 'a?b')
    """
    return re.sub(r"[\s,]", "?", re.sub(r"([*?\[])", r"[\1]", name))


def gathered(items: Iterable[str]) -> tuple[list[str], str]:
    """Sort out ``key=value`` items: return those for all tensors, and the others as one text.

    >>> gathered(["weight_decay=0.1", "weight_decay=0@*norm*, *bias", "lr=0.1@embed*"])
    (['weight_decay=0.1'], 'weight_decay=0@*norm*,*bias lr=0.1@embed*')
    """
    plain, clauses = list[str](), list[str]()
    for item in items:
        key, _equals, value = item.partition("=")
        number, at, patterns = value.partition("@")
        if key.strip() == SETTING:
            clauses.append(value.strip())
        elif at and _is_number(number):
            # A space separates values, so one within a name becomes a wildcard.
            each = (re.sub(r"\s", "?", pattern.strip()) for pattern in patterns.split(","))
            clauses.append(f"{key.strip()}={number.strip()}@{','.join(each)}")
        else:
            plain.append(item)
    return plain, " ".join(clause for clause in clauses if clause)


def _clause(item: str) -> Clause:
    setting, _equals, rest = item.partition("=")
    number, _at, patterns = rest.partition("@")
    each = tuple(patterns.split(","))
    if not setting or not all(each) or not _is_number(number):
        raise UsageError(
            f"{item!r} gives no tensors a value: write setting=value@pattern,pattern, as in"
            " weight_decay=0@*norm*,*bias"
        )
    value = float(number)
    if not (value == 0 or 1e-37 < value < 1e37):  # also if it is NaN
        raise UsageError(f"{item!r}: the value must be 0, or from 1e-37 to 1e37")
    return Clause(setting, value, each)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
