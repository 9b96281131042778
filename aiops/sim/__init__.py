"""Two simulators of the server and its clients; both run the same code as real runs.

``turns``: clients in turn, without a clock, for thousands of them (FRED's model). ``virtual``: an
event loop with a clock of its own and a network in memory, on which real servers and clients run;
``cluster``: a whole training run there.
"""
