"""Deterministic shells: the engine and its clients in one thread, with no sockets and no clocks."""
