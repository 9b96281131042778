"""A cluster in virtual time: what it consists of, how it runs, what comes of it."""
