"""``aiops bandwidth``: accuracy against bytes, for gates, codecs and budgets over TCP."""
