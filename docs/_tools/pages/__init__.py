"""The algorithms' pages, for the terminal and for docs/algorithms: all from their docstrings.

`docstring` reads one, `settings` and `facts` ask the classes themselves, `markdown` writes the
pages, `plots` draws an algorithm among its neighbours. ``python -m docs._tools.pages
docs/algorithms`` writes it all.
"""
