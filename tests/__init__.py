"""The test suite; mirrors aiops/."""
