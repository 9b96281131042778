"""The papers' figures, each a declaration."""
