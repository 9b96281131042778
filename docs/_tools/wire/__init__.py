"""The generator of the wire's pages: docs/wire.md, its neighbours, and wire-vectors.json.

``python -m docs._tools.wire docs/wire.md`` rewrites the marked blocks of these pages, and the file
of vectors beside them. Everything comes from the code that speaks the wire, so that pages which the
tests find up to date document what the code does.
"""
