"""The table of metrics in docs/guide-monitoring.md, from the code."""
