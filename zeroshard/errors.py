"""The exceptions a user can meet. Every message says what was expected, what came, what to do."""

__all__ = [
    "CheckpointError",
    "CommunicationError",
    "ConfigError",
    "GradientError",
    "ShardTensorError",
    "ZeroShardError",
]


class ZeroShardError(Exception):
    """The base of all exceptions raised by zeroshard."""


class ConfigError(ZeroShardError, ValueError):
    """A wrong argument, or a model and an optimizer that do not fit together (any longer)."""


class CheckpointError(ConfigError):
    """A checkpoint that is missing, damaged, or of another model, or that cannot be written."""


class GradientError(ZeroShardError, RuntimeError):
    """A gradient that cannot be used: left local by ``no_sync()``, sparse, or of a wrong shape."""


class CommunicationError(ZeroShardError, RuntimeError):
    """A collective that failed, timed out, or that the ranks did not enter together."""


class ShardTensorError(ZeroShardError, RuntimeError):
    """An operation that this rank's slice of a tensor cannot answer rightly."""
