"""The examples of docs/wire.md.

``python -m docs._tools.wire docs/wire.md`` rewrites the marked blocks of that page, and
wire-vectors.json beside it. Everything comes from the code that speaks the wire, so a page that
the tests find up to date says what the code does.
"""
