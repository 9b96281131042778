"""Filters: refuse gradients that are finite, but unlike those of the other workers.

A filter gets numbers that were measured of a push (the norm of each of its tensors), and decides on
them alone; so a replay decides the same. `aiops.filters.screen` has what all filters share: who is
refused too often is quarantined.
"""
