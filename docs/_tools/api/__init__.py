"""The page of the public names, docs/api.md."""
