"""Model averaging from worker to worker, sans-I/O."""
