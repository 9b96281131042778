"""The live page: a server's report as a small document, its changes from tick to tick, the page."""
