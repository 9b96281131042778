"""Simulation in turns: a server and its clients in memory, deterministic, without a clock."""
