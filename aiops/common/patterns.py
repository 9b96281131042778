"""Match patterns with wildcards against the names of a model's tensors."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from aiops.errors import nearest


def unmatched(patterns: Iterable[tuple[str, str]], names: Sequence[str]) -> str | None:
    """Return which pattern matches none of the names, as a sentence; None: each matches one.

    It tells the name that is nearest to the pattern, compared without the wildcards.

    >>> unmatched([("*.bias", "raw@*.bias"), ("heda*", "raw@heda*")], ["head.bias"])
    "no tensor's name matches 'heda*' of raw@heda*; did you mean 'head.bias'?"

    Parameters
    ----------
    patterns
        Each pattern, and the whole of what was given with it.
    names
        Those of the model's tensors.
    """
    for pattern, given in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            hint = _nearest(re.sub(r"[*?\[\]]", "", pattern), names)
            return f"no tensor's name matches {pattern!r} of {given}; {hint}"
    return None


def _nearest(word: str, names: Sequence[str]) -> str:
    """Return a hint for a pattern: a tensor whose name, or a part of whose name, is like it."""
    candidates = {part: name for name in reversed(names) for part in name.split(".")}
    candidates |= {name: name for name in names}
    close = difflib.get_close_matches(word, candidates, n=1, cutoff=0.5)
    return f"did you mean {candidates[close[0]]!r}?" if close else nearest("", names)
