"""Spending fewer bytes: gates, token bucket, controller, byte accounting."""
