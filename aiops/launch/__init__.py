"""Start a server and its workers on one machine, watch them, and start again what dies."""
