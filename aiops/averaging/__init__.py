"""Model averaging from worker to worker."""
