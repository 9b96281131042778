"""The package's version: its own module, so that every room can state it."""

__version__ = "0.1.0"
