"""An order of turns: clients and a server in memory, deterministic, without a clock."""
