"""The configuration of a run: its sections, their reference, and the loader."""
