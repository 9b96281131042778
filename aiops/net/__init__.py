"""Sockets, threads, clocks: the only room that knows the machine."""
