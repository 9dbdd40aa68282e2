"""Sweeps: what is tried, on Ray Tune, and what is answered."""
