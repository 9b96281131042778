"""Experiments: what the papers claim, and what a setting costs, as runs of real processes."""
