"""The subcommands of ``aiops``, one module each; `aiops.cli` puts them together.

What is slow to import is imported inside the functions, so that ``aiops --help`` is quick.
"""
