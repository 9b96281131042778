"""``aiops demo``: a server and several workers, real processes, train a real model.

::

    settings.py   the settings and their defaults        run.py      one demo, from start to end
    worker.py     a worker process                       record.py   what was measured
    plot.py       a record as a figure                   display.py  a record on a terminal

This module imports nothing, so that a child process starts quickly.
"""
