"""What rayrm raises when the user can do something about it.

RayrmError
├── ConfigError       the configuration or the command is wrong (exit status 2)
├── DataError         the rows cannot be trained on (exit status 1)
└── CheckpointError   a checkpoint or an exported model cannot be trusted (exit status 1)
"""


class RayrmError(Exception):
    """Base of every error that rayrm raises on purpose; its text names the place and the remedy."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        """Return the text as it was raised: Ray Data adds its own remedies to the arguments."""
        return self.message


class ConfigError(RayrmError):
    """The configuration or the command line is wrong; nothing was started."""


class DataError(RayrmError):
    """The data cannot be read or holds nothing to train on."""


class CheckpointError(RayrmError):
    """A checkpoint or saved model is incomplete, foreign, or does not score as the trained one."""


def own_error(error: BaseException | None) -> RayrmError | None:
    """Return the error of ours that ``error`` wraps: Ray does that to what its tasks raise."""
    while error is not None:
        cause = getattr(error, "cause", None) or error.__cause__
        if cause is None and isinstance(error, RayrmError):
            return error
        error = cause
    return None
