"""One model on several servers: a lead that decides, and followers that hold parts of the arena.

The lead is an `aiops.engine.engine.Engine` that keeps only the first part of the arena's bytes.
What its effects mean for the other parts it orders its followers to do; those decide nothing. So
barriers, refusals, exactly-once and versions are one decision, and what any answer brings is of one
version.
"""
