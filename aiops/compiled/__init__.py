"""Compiled code, which aiops does without where it is missing: its specification is in Python."""

from __future__ import annotations

from aiops.compiled.loading import COMPILED, exchange_type

__all__ = ["COMPILED", "exchange_type"]
