"""The Acme NPU as a device of polyreme. Replace the library and the facts by those of your chip.

Found by the entry point in pyproject.toml. `polyreme device list` shows npu:0 then, `polyreme.set_device("npu:0")` uses
it, and `polyreme device check npu:0 --output npu` writes the report that a pull request is asked for.
"""

import os
from pathlib import Path

from polyreme.device import Plugin

LIBRARY = "ACME_NPU_LIBRARY"
"""Environment variable with the path of the library, where it is not the one beside this file."""


def plugin() -> Plugin:
    """What polyreme is told: loaded lazily, after the library was tried in a process of its own."""
    beside = Path(__file__).with_name("libpjrt_acme.so")
    return Plugin(
        name="npu",
        library=os.environ.get(LIBRARY, str(beside)),
        options={},  # what the library takes when its client is made, such as memory limits
        factor_bits=24,  # 11 if factors of float32 products are rounded to tf32, 8 if to bfloat16
        step_options={},  # compiler options of whole training steps
    )
