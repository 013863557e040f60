"""Every error class a user can meet; each subclasses the builtin a Python reader expects.

A message says what was asked, what was got and what to change.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ShapeError(ValueError):
    """Shapes that do not fit together, or a dim that is out of range."""


class DTypeError(TypeError):
    """A dtype the operation does not take."""


class PlacementError(ValueError):
    """A mesh, placement or device that does not fit what is placed on it."""


class DeviceError(RuntimeError):
    """A device that was asked for and is not there."""


class GradError(RuntimeError):
    """A derivative that cannot be taken: graph freed, leaf changed in place, no path."""


class CaptureError(RuntimeError):
    """Code that cannot be captured into one program: a host read, a leaked value."""


class HostValueError(CaptureError):
    """Code that cannot be captured because it reads a value on the host."""


class ProgramError(RuntimeError):
    """A static Program that cannot be built or run as asked: a missing value, feed or fetch, a wrong order."""


class ConfigError(ValueError):
    """A setting that is unknown, of the wrong type or out of range. Exit code 2."""


class StrategyError(ConfigError, TypeError):
    """A setting of a DistributedStrategy that is unknown or of the wrong type. Exit code 2."""


class NotReadyError(ConfigError, AttributeError):
    """A part that is asked for before it is set up, such as fleet's groups before fleet.init. Exit code 2."""


class DataError(RuntimeError):
    """Input data that is missing, corrupt or hung. Exit code 3."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, torn, corrupt or does not fit the model. Exit code 4."""


class NoSpaceError(CheckpointError):
    """A disk too full for a checkpoint; need and free are bytes. Exit code 4."""

    def __init__(self, message: str, need: int, free: int) -> None:
        super().__init__(message)
        self.need = need
        self.free = free


class RankError(RuntimeError):
    """Another rank of a parallel job failed, is gone, or asked for something else in the same collective."""


class AbsentError(NotImplementedError):
    """A part of PaddlePaddle that polyreme does not have, met when it is used; a script may import it."""


class NumericsError(ArithmeticError):
    """NaN, infinity or an out-of-range index met while training. Exit code 5."""


class CompressionError(RuntimeError):
    """A model that became too much worse when it was made smaller. Exit code 5."""


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    PlacementError: 2,
    DeviceError: 2,
    DataError: 3,
    CheckpointError: 4,
    NumericsError: 5,
    CompressionError: 5,
}
EXIT_INTERNAL = 70
EXIT_PREEMPTED = 75
EXIT_WATCHDOG = 86


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name: the closest valid name if one is near, else all of them.

    >>> did_you_mean("shardin", ["dp", "sharding"])
    "; did you mean 'sharding'?"
    >>> did_you_mean("zz", ["dp", "mp"])
    '; the choices are dp, mp'
    """
    names = list(choices)
    close = get_close_matches(str(name), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; the choices are {', '.join(names)}"
