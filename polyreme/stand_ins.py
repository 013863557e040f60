"""Stand-ins for what PaddlePaddle has and polyreme does not: they can be imported, and say so when they are used."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from polyreme.errors import AbsentError


class Absent(type):
    """The class of stand-ins: classes themselves, so that scripts may derive from them and ask isinstance.

    Calling one, or a class derived from it, raises AbsentError; an attribute of one AttributeError. It is false, as
    scripts ask for what a build may lack.
    """

    def __bool__(cls) -> bool:
        return False

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise AbsentError(cls._message())

    def __getattr__(cls, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(f"{name!r} of {cls._message()}")

    def __repr__(cls) -> str:
        return f"<absent: {cls.__name__}>"

    def _message(cls) -> str:
        return next(base.__dict__["message"] for base in cls.__mro__ if "message" in base.__dict__)


@functools.cache
def absent(path: str, why: str) -> Absent:
    """The stand-in of paddle.<path>; why: the reason, or what to use instead.

    >>> absent("onnx.export", "use jit.save")
    <absent: export>
    """
    name = path.rpartition(".")[2]
    return Absent(
        name, (), {"message": f"paddle.{path}: polyreme does not have it; {why}", "__module__": f"paddle.{path}"}
    )
