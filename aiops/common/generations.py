"""The numbers of a run's generations: each start and each promotion has a higher one.

A number has three parts: the term, which a promotion begins, in the upper bits; the starts in this
term, in 16 bits; and 20 bits that are drawn at random. So the numbers of two servers that were
begun with copies of one state, or of two standbys that were promoted at the same time, are not the
same, and the higher one is taken for the later.
"""

from __future__ import annotations

DRAWN = 1 << 20
"""The random part of a number is below this."""

_STARTS = 1 << 16


def ordinal(generation: int) -> int:
    """Return a generation without its random part: each start and each promotion raises it."""
    return generation // DRAWN


def next_start(generation: int, drawn: int) -> int:
    """Return the number of the start after a generation."""
    return (ordinal(generation) + 1) * DRAWN + drawn


def next_term(generation: int, drawn: int) -> int:
    """Return the number of a promotion after a generation."""
    return (term(generation) + 1) * _STARTS * DRAWN + drawn


def before_term(generation: int) -> int:
    """Return the last number of the terms before that of a generation."""
    return max(0, term(generation) * _STARTS * DRAWN - 1)


def term(generation: int) -> int:
    """Return how many promotions there were up to a generation."""
    return ordinal(generation) // _STARTS


def generation_text(generation: int) -> str:
    """Return a generation for people: "3", or "2.1" after two promotions and another start.

    Numbers without a random part, those of earlier releases, are printed as they are.
    """
    if generation < DRAWN:
        return str(generation)
    starts = ordinal(generation) % _STARTS
    return f"{term(generation)}.{starts}" if term(generation) else str(starts)
