"""The reward model: backbone, head, adapters, loss and metrics."""
