"""The commands of ``aiops``: flags in, tables or JSON out."""
