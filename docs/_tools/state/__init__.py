"""The generator of the tables and examples of docs/state.md."""
