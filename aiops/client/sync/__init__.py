"""The blocking face of a client: plain sockets, and a thread where one is needed."""
