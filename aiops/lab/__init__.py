"""Real data, the demo, a slow link, the papers' figures; only `aiops.cli` imports it."""
