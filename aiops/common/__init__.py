"""Helpers that any room may use: URLs, readable figures, loading an object by its name."""
