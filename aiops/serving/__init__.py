"""The server's shell: carries out the engine's effects on sockets, files and timers."""
