"""What happens on a worker: the engine, the loop, and what watches it."""
