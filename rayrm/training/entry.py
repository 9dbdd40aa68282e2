"""Where Ray Train enters: its controller loads this, and only workers load what they need."""

from typing import Any


def run_worker(loop_config: dict[str, Any]) -> dict[str, Any] | None:
    """Train in this worker; the job is under ``job``."""
    from rayrm.training.worker import train_worker

    return train_worker(loop_config["job"])
