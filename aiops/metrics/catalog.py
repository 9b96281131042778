"""All metrics of a server, and the labels of the one about its settings."""

from __future__ import annotations

from aiops.metrics import traffic, training, upkeep, workers

INFO = "aiops_info"
INFO_HELP = "Always 1: the labels tell the server's version and settings."
INFO_LABELS = ("version", "policy", "gate", "push_codec", "fetch_codec", "filter", "acks")

METRICS = (*training.METRICS, *traffic.METRICS, *upkeep.METRICS, *workers.METRICS)
"""In the order in which they are exposed; `INFO` comes first."""
