"""A block of code that changes what is in force: modes, Programs, plans, flags; nothing of it outlives the block."""

from collections.abc import Iterator
from contextlib import contextmanager

import polyreme as paddle
from polyreme import flags, static
from polyreme.core import unique_name
from polyreme.distributed import fleet
from polyreme.distributed.auto_parallel.tensors.process_mesh import clear_mesh
from polyreme.distributed.placement import clear_plan


@contextmanager
def isolated() -> Iterator[None]:
    """Programs, a scope and names of its own inside; dynamic mode, no plan, and flags and default dtype as before
    after it."""
    dtype, settings = paddle.get_default_dtype(), {name: flag.value for name, flag in flags.FLAGS.items()}
    programs = static.program_guard(static.Program(), static.Program())
    try:
        with unique_name.guard(), programs, static.scope_guard(static.Scope()):
            yield
    finally:
        paddle.disable_static()
        paddle.set_default_dtype(dtype)
        flags.set_flags(settings)
        fleet.reset()
        clear_mesh()
        clear_plan()
