"""A cluster in virtual time: its settings, its run, its result."""
