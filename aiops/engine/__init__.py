"""Decisions: events in, effects out."""
