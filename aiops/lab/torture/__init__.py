"""``aiops torture``: kill real servers and workers at random instants, and count what was lost.

::

    checker.py    what clients saw, against the model      plan.py      what a seed decides
    pusher.py     a worker process                         trial.py     one plan, carried out
    spawner.py    forks processes, tells how they ended    campaign.py  many trials, and the report

The checker knows no more than a client: its own acknowledgements, and the parameters that it may
fetch. Under an additive policy with learning rate 1, every push adds to a place of its own in a
float64 model, so the model tells how many times each was applied: an acknowledged push exactly
once, any other at most once.
"""
