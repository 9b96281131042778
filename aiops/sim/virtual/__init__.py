"""Virtual time: an event loop whose clock jumps, and a network in memory."""
