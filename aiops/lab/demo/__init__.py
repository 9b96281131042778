"""``aiops demo``: a server and several workers, real processes, train a real model.

::

    settings.py   what is trained, and with which defaults      run.py     the course of a demo
    worker.py     a worker process                              record.py  what was seen of it
    children.py   processes that are started and ended          display.py on a terminal, as lines
                                                                plot.py    as a figure

This page imports nothing, so that a child process starts quickly.
"""
