"""Two simulators of the same server and clients, neither of which is a second implementation.

``turns``: an order of clients and no clock, for thousands of them (FRED's model). ``virtual``: an
event loop with a clock of its own, and a network in memory, on which real servers and clients run;
``cluster``: a whole training run there.
"""
