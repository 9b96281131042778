"""Bytes to messages and back, sans-I/O."""
