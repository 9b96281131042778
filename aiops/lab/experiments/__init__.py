"""Experiments: ``aiops bandwidth`` over TCP, and ``aiops experiment``, the papers' figures by name.

`experiment` says what one is, `papers` declares them, and `catalog` finds them. `course` runs what
is missing with `crew`'s processes, `runs` keeps what is finished, `report` and `drawing` write it.
"""
