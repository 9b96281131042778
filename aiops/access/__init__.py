"""Access to a server: the tokens that there are, and what the holder of each may do."""
