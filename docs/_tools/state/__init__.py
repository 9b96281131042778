"""What writes the generated parts of docs/state.md."""
