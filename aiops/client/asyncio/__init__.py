"""The awaiting face of a client: the same names as in `aiops.client.sync`, on an event loop."""
