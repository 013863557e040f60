"""Every error class a user can meet; each subclasses the builtin a Python reader expects.

A message says what was asked, what was got and what to change. Notes under it say which layer and line it was, and the
code that `polyreme explain` tells more of; docs/errors.md lists all.
"""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from polyreme.call_site import layer_note


class Explained:
    """What all error classes here have in common.

    code: what `polyreme explain` takes. cause: when it is raised; cure: what helps, both sentences. tells_layer:
    whether it notes the layer that it is raised in.
    """

    code: ClassVar[str]
    cause: ClassVar[str]
    cure: ClassVar[str]
    tells_layer: ClassVar[bool] = False

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        error: Any = super().__new__(cls, *args, **kwargs)
        where = layer_note() if cls.tells_layer else ""
        error.__notes__ = [*([where] if where else []), f"more: polyreme explain {cls.code}"]
        return error

    def add_note(self, note: str) -> None:
        """Add a line above the last one, which names the code; jax's remarks on its own frames are left out."""
        if "JAX has removed its internal frames" in note:
            return
        notes: list[str] = vars(self).setdefault("__notes__", [])
        notes.insert(max(0, len(notes) - 1), note)


class ShapeError(Explained, ValueError):
    """Shapes that do not fit together, or a dim that is out of range."""

    code = "PR101"
    cause = (
        "Dims that must agree differ, or a dim, axis or index is out of range. The message names the op, the dim "
        "and the shapes that came; the note names the layer by its path and your line."
    )
    cure = (
        "Print the shapes at that line; transpose, reshape or pad the input, or give the layer the sizes that "
        "come (in_features, num_channels). `paddle.summary(net, input_size)` lists the shape of every layer."
    )
    tells_layer = True


class DTypeError(Explained, TypeError):
    """A dtype the operation does not take."""

    code = "PR102"
    cause = (
        "An op was called with a dtype it has no meaning or routine for, such as integers where a gradient is "
        "needed or bool in arithmetic."
    )
    cure = "Convert with astype(...) before the call, or set the dtype where the Tensor is made."
    tells_layer = True


class PlacementError(Explained, ValueError):
    """A mesh, placement or device that does not fit what is placed on it."""

    code = "PR103"
    cause = (
        "A mesh, placement, plan or device does not fit: an axis splits a dim that does not divide, the plan asks "
        "for more devices than there are, or two tensors lie on different meshes."
    )
    cure = (
        "Change the degrees of the plan so that they divide the dims and multiply to the number of devices "
        "(CPU_NUM=N gives N virtual ones), or reshard the tensor."
    )


class DeviceError(Explained, RuntimeError):
    """A device that was asked for and is not there."""

    code = "PR104"
    cause = (
        "A device was asked for that jax does not show: no driver or plug-in, a wrong index, or "
        "CUDA_VISIBLE_DEVICES hides it."
    )
    cure = "Run `polyreme doctor` and `polyreme device list`; install the plug-in, or ask for a device that is listed."


class GradError(Explained, RuntimeError):
    """A derivative that cannot be taken: graph freed, leaf changed in place, no path."""

    code = "PR201"
    cause = (
        "A derivative cannot be taken: the graph was freed by an earlier backward, a leaf was changed in place, "
        "or nothing that wants a gradient leads to the result."
    )
    cure = (
        "Call backward(retain_graph=True) where it runs twice, change leaves under no_grad(), and set "
        "stop_gradient=False on what is differentiated."
    )


class CaptureError(Explained, RuntimeError):
    """Code that cannot be captured into one program: a host read, a leaked value."""

    code = "PR202"
    cause = (
        "Code that to_static or a loop over Tensors cannot make one program of: a value leaks out of the captured "
        "function, or Python state changes inside it. The message begins with your line."
    )
    cure = (
        "Return values rather than keep them in lists or attributes outside; docs/capture.md shows each case. "
        "Without the decorator the code runs op by op."
    )


class HostValueError(CaptureError):
    """Code that cannot be captured because it reads a value on the host."""

    code = "PR203"
    cause = (
        "Captured code reads a Tensor's value on the host, with float(t), t.numpy() or an if that could not be "
        "converted."
    )
    cure = "Keep the value a Tensor, or move the read after the captured call; docs/capture.md."


class ProgramError(Explained, RuntimeError):
    """A static Program that cannot be built or run as asked: a missing value, feed or fetch, a wrong order."""

    code = "PR204"
    cause = (
        "A static Program is built or run as it cannot be: a feed or fetch that is not there, a variable without "
        "a value, or operations in a wrong order."
    )
    cure = (
        "Run the startup program first, feed every static.data, and fetch names that the Program has; "
        "`print(program)` lists them."
    )


class ConfigError(Explained, ValueError):
    """A setting that is unknown, of the wrong type or out of range. Exit code 2."""

    code = "PR301"
    cause = (
        "A setting is unknown, of the wrong type, or out of range, or two settings contradict each other. Exit code 2."
    )
    cure = (
        "Follow the message, which names the key and the nearest valid one; `polyreme pretrain --settings` lists "
        "all keys, --dry-run shows where each value comes from."
    )


class StrategyError(ConfigError, TypeError):
    """A setting of a DistributedStrategy that is unknown or of the wrong type. Exit code 2."""

    code = "PR302"
    cause = "A DistributedStrategy was given a setting that it does not have or of another type. Exit code 2."
    cure = "Use the name in the message; docs/fleet.md has the table of settings."


class NotReadyError(ConfigError, AttributeError):
    """A part that is asked for before it is set up, such as fleet's groups before fleet.init. Exit code 2."""

    code = "PR303"
    cause = "A part was used before it was set up, such as fleet's groups before fleet.init. Exit code 2."
    cure = "Call what the message names first."


class ArgumentTypeError(ConfigError, TypeError):
    """An argument of another type than the setting takes. Exit code 2."""

    code = "PR304"
    cause = "An argument is of another type than the setting takes, such as a text for a number. Exit code 2."
    cure = "Give what the message asks for."


class DataError(Explained, RuntimeError):
    """Input data that is missing, corrupt or hung. Exit code 3."""

    code = "PR401"
    cause = "Training data is missing, corrupt, too short, or its workers hang. Exit code 3."
    cure = (
        "Look at the file and line that the message names; `polyreme data check` reads all of it, data.skip_bad "
        "leaves bad lines out."
    )


class CheckpointError(Explained, RuntimeError):
    """A checkpoint that is missing, torn, corrupt or does not fit the model. Exit code 4."""

    code = "PR402"
    cause = "A checkpoint is missing, torn, fails its digest, or does not fit the model. Exit code 4."
    cure = (
        "Resume from an earlier step (--resume STEP), or give the model the configuration it was saved with; "
        "docs/reliability.md."
    )


class NoSpaceError(CheckpointError):
    """A disk too full for a checkpoint; need and free are bytes. Exit code 4."""

    code = "PR403"
    cause = "The disk has less free space than the checkpoint needs. Exit code 4."
    cure = "Make room, lower checkpoint.keep, or set output to another disk."

    def __init__(self, message: str, need: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.need = need
        self.free = free


class DeviceMemoryError(Explained, MemoryError, RuntimeError):
    """A device's memory does not suffice. Exit code 2.

    asked: bytes that could not be allocated, 0 if not known; parts: name -> bytes of what lies on the fullest device;
    facts: the message without what to change.
    """

    asked: int
    parts: dict[str, int]
    facts: str

    code = "PR105"
    cause = (
        "A device has no room for what was to be allocated. The message says how much was asked for, by which op or "
        "program and layer, and what lies on the fullest device: parameters, gradients, optimizer state, activations "
        "that wait for the backward, and the rest. Exit code 2."
    )
    cure = (
        "Take the first of the changes that the message lists, with what each saves. `polyreme pretrain CONFIG "
        "--dry-run` and `polyreme plan` tell beforehand what fits."
    )
    tells_layer = True

    def __init__(self, facts: str, asked: int = 0, parts: Mapping[str, int] | None = None, advice: str = "") -> None:
        super().__init__(f"{facts}. {advice}" if advice else facts)
        self.asked, self.parts, self.facts = asked, dict(parts or {}), facts


class RankError(Explained, RuntimeError):
    """Another rank of a parallel job failed, is gone, or asked for something else in the same collective."""

    code = "PR501"
    cause = "Another process of a parallel job failed, is gone, or called a collective with other arguments."
    cure = "Look at the log of the rank that the message names; polyreme launch keeps one per rank. docs/launch.md."


class AbsentError(Explained, NotImplementedError):
    """A part of PaddlePaddle that polyreme does not have, met when it is used; a script may import it."""

    code = "PR502"
    cause = "A script uses a part of PaddlePaddle that polyreme does not have."
    cure = "Use what the message names in its place; docs/api_coverage.md lists what there is."


class NumericsError(Explained, ArithmeticError, RuntimeError):
    """NaN, infinity or an out-of-range index met while training. Exit code 5."""

    code = "PR601"
    cause = "NaN, infinity or an index out of range came up in training. Exit code 5."
    cure = (
        "Look at the tensor, step and samples that the message names; lower the learning rate, set clip_norm, or "
        "run with FLAGS_check_nan_inf=1. docs/numerics.md."
    )


class CompressionError(Explained, RuntimeError):
    """A model that became too much worse when it was made smaller. Exit code 5."""

    code = "PR602"
    cause = "A model lost more quality than allowed when it was quantized or pruned, and was not written. Exit code 5."
    cure = "Use more bits, a smaller group or sparsity, more calibration text, or another method; docs/compression.md."


EXIT_CODES: dict[type[BaseException], int] = {
    ConfigError: 2,
    PlacementError: 2,
    DeviceError: 2,
    DeviceMemoryError: 2,
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
    if not names:
        return "; there are none"
    return nearest(name, names) or f"; the choices are {', '.join(names)}"


def nearest(name: object, choices: Iterable[str]) -> str:
    """The end of a message about an unknown name among many: the closest one if one is near, else nothing.

    >>> nearest("relo", ["gelu", "relu"])
    "; did you mean 'relu'?"
    >>> nearest("Adamw", ["Adam", "AdamW"])
    "; did you mean 'AdamW'?"
    >>> nearest("nproc", ["rank", "nproc_per_node"])
    "; did you mean 'nproc_per_node'?"
    """
    text = str(name)
    if text.startswith("__"):  # Python's own, which whatever inspects a module asks for
        return ""
    names = list(choices)
    same_letters = [choice for choice in names if choice.casefold() == text.casefold()]
    longer = [choice for choice in names if len(text) > 2 and choice.startswith(text)]
    close = same_letters or get_close_matches(text, names, n=1) or longer
    return f"; did you mean {close[0]!r}?" if close else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory did not suffice; recognised by name and words, so that jax need not be imported.

    XLA says RESOURCE_EXHAUSTED where it allocates, and INTERNAL where a program that was dispatched earlier could not.
    """
    is_of_xla = type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
    return is_of_xla and any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory allocating"))


def error_classes() -> list[type[Explained]]:
    """Every error class, by code.

    >>> error_classes()[0].__name__
    'ShapeError'
    """
    return sorted(set(_classes_below(Explained)), key=lambda kind: kind.code)


def _classes_below(kind: type[Explained]) -> Iterator[type[Explained]]:
    for child in kind.__subclasses__():
        yield from ([child] if child.__module__ == __name__ else [])
        yield from _classes_below(child)


def explanation(name: str) -> type[Explained]:
    """The class of a code or class name, in any case. Raises ConfigError for one that is none.

    >>> explanation("pr101") is ShapeError
    True
    """
    names = {key.lower(): kind for kind in error_classes() for key in (kind.code, kind.__name__)}
    if name.lower() not in names:
        known = [key for kind in error_classes() for key in (kind.code, kind.__name__)]
        raise ConfigError(f"there is no error {name!r}{did_you_mean(name, known)}")
    return names[name.lower()]
