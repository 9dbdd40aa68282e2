"""Bradley-Terry reward models on Ray: fit(config) takes preference shards to a scorer.

Importing this loads neither torch nor Ray; what needs them is loaded at its first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rayrm.errors import CheckpointError, ConfigError, DataError, RayrmError

if TYPE_CHECKING:
    from rayrm.launch import FitResult, fit
    from rayrm.tuning.answer import SweepResult
    from rayrm.tuning.search import sweep

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "FitResult",
    "RayrmError",
    "SweepResult",
    "fit",
    "sweep",
]

_HOMES = {
    "FitResult": "rayrm.launch",
    "SweepResult": "rayrm.tuning.answer",
    "fit": "rayrm.launch",
    "sweep": "rayrm.tuning.search",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rayrm' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
