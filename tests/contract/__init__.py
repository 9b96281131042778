"""Suites that every algorithm, kernel backend and client passes."""
