"""A standby and the primary that feeds it."""
