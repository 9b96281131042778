"""The pages of docs/algorithms, and docs/experiments.md.

`markdown` writes the algorithms' pages (`aiops.cli.policy_page` reads their docstrings), `curves`
reads what was measured, `plots` draws it, and `experiments` writes the other page.
``python -m docs._tools.pages docs/algorithms`` writes it all.
"""
