"""Every XLA option polyreme sets, by backend, each with its reason.

They are given to jax.jit with each captured program; only QUICK's are put into XLA_FLAGS, as eager ops take no options:
there an unknown name ends the process, and names come and go with jaxlib. An option that this jaxlib does not know is
left out and logged. What the user names in XLA_FLAGS or LIBTPU_INIT_ARGS is left to the user.

Source of the GPU and TPU choices: the public XLA flag guidance (openxla.org/xla/flags_guidance), as MaxText and
JAX-Toolbox use them. Whether a program's collectives then hide is what `polyreme comm` shows.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib.version
from jax.sharding import SingleDeviceSharding

_log = logging.getLogger("polyreme.core")


class Option(NamedTuple):
    """One XLA option: its name, its value and why it is set. until: the last jaxlib that knows it, if a later one does
    not."""

    name: str
    value: bool | int | str
    reason: str
    until: tuple[int, int] | None = None


# Bytes of a gradient bucket. A ring among 8 devices at 450e9 bytes/s moves it in 0.2 ms, far above a collective's
# start-up of 20 us; and a 7B model's gradients still make 200 buckets, so the first leave early in the backward pass.
BUCKET_BYTES = 64 << 20

_GPU = (
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "products go to cuBLAS: a large one is as fast there, and is not compiled and timed in dozens of Triton forms "
        "first, which took most of the compilation of a step",
    ),
    Option(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "products that share their rows stay apart: XLA joins their weights first, in every call, and where few rows "
        "are multiplied, as in decoding, that takes longer than the products",
    ),
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "starts a collective as soon as its input is there and waits for it as late as its first use, so that the "
        "backward of other layers runs meanwhile",
    ),
    Option("xla_gpu_enable_highest_priority_async_stream", True, "a collective's kernel is not queued behind products"),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes",
        BUCKET_BYTES,
        "gradient buckets: many small all-reduces become one of this size",
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        BUCKET_BYTES,
        "gradient buckets under sharding stages 1, 2 and 3",
    ),
    Option(
        "xla_gpu_all_gather_combine_threshold_bytes",
        BUCKET_BYTES,
        "parameters are gathered a bucket at a time; a larger one would hold more of them whole under stage 3",
    ),
    Option(
        "xla_gpu_enable_all_gather_combine_by_dim",
        False,
        "parameters are split along different dims; by dim, most gathers would stay alone",
    ),
    Option("xla_gpu_enable_reduce_scatter_combine_by_dim", False, "as for gathers: one bucket, whatever the dim"),
    Option(
        "xla_gpu_enable_pipelined_all_gather",
        True,
        "in a loop over layers or microbatches the next round's gather runs during this one",
        until=(0, 10),
    ),
    Option(
        "xla_gpu_enable_pipelined_reduce_scatter",
        True,
        "in a loop, this round's reduction runs during the next",
        until=(0, 10),
    ),
    Option(
        "xla_gpu_enable_pipelined_all_reduce",
        True,
        "in a loop, this round's reduction runs during the next",
        until=(0, 10),
    ),
    Option(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "unrolls such loops by two, without which pipelined collectives copy their results",
    ),
    Option(
        "xla_gpu_multi_streamed_windowed_einsum",
        True,
        "collective matmul: a product whose input is gathered (sequence parallel) is cut in pieces, each computed "
        "while the next is on its way",
    ),
)

_TPU = (
    Option("xla_tpu_enable_latency_hiding_scheduler", True, "as on GPU: collectives start early and are awaited late"),
    Option("xla_enable_async_all_gather", True, "a parameter's gather runs beside products"),
    Option("xla_tpu_enable_async_all_to_all", True, "rows for experts travel while the experts of others compute"),
    Option("xla_tpu_enable_async_ragged_all_to_all", True, "the same for rows in parts that differ in size"),
    Option("xla_enable_async_collective_permute", True, "ring attention and pipelined sends run beside products"),
    Option("xla_tpu_enable_async_collective_fusion", True, "a collective is fused with the product that hides it"),
    Option("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True, "the same for gathers of parameters"),
    Option("xla_tpu_enable_async_collective_fusion_multiple_steps", True, "one collective spans several products"),
    Option("xla_tpu_overlap_compute_collective_tc", True, "products go on while the tensor core drives a collective"),
    Option("xla_tpu_enable_data_parallel_all_reduce_opt", True, "gradient reductions are put beside the backward"),
    Option("xla_tpu_data_parallel_opt_different_sized_ops", True, "the same where gradients differ in size"),
)

_CPU = (
    Option(
        "xla_disable_hlo_passes",
        "cse_barrier_expander",
        "the CPU compiler takes optimization barriers out early and then merges what is computed twice, so recomputing "
        "saves nothing: 6 transformer blocks took 208 MiB of scratch memory recomputed or not, 83 MiB without this "
        "pass. Nothing else helps: its collectives are synchronous, and it fuses gradient buckets unasked",
    ),
)

OPTIONS: Mapping[str, tuple[Option, ...]] = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "tpu": _TPU}
"""By the name of the backend, as jax.default_backend() spells it; another one gets none."""

DEPTH_FIRST = Option(
    "xla_cpu_scheduler_type",
    "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
    "operations depth first, each chain of them to its end, not all that can run beside each other as early as they "
    "can: a GPT's step takes 157 MiB of scratch memory instead of 260, at the same speed on two cores",
)

ONE_DEVICE: Mapping[str, tuple[Option, ...]] = {"cpu": (DEPTH_FIRST,)}
"""Of whole steps in a process with one device, beside OPTIONS."""

QUICK: Mapping[str, str] = {
    # LLVM code by XLA itself, not by way of MLIR: ops compile in half the time and run as fast
    "xla_cpu_use_fusion_emitters": "false",
    # a program is one object, not one for each of its loops, which threads would compile beside each other: those wait
    # for each other's malloc, whose arena is one (host_memory), and a batch norm takes twice the processor time so
    "xla_cpu_parallel_codegen_split_count": "1",
}
"""Flags for every program on CPU, eager ops' too."""

MANY_CORES: Mapping[str, tuple[Option, ...]] = {
    "cpu": (
        Option(
            "xla_cpu_parallel_codegen_split_count",
            32,
            "all cores compile a step's loops, as XLA does by default. Two cores compile a GPT's step no sooner "
            "than one does, and take a half more processor time",
        ),
    )
}
"""Of whole steps on more than kernels.select.FEW_CORES, beside OPTIONS."""

DRAWING: Mapping[str, tuple[Option, ...]] = {
    "cpu": (
        Option(
            "xla_backend_optimization_level",
            2,
            "numbers drawn by rejection (gamma, poisson) compile in half the time, and all run as fast. Only for "
            "programs that draw: a sum over rows by index (scatter) runs three times as long at this level",
        ),
    )
}
"""Of programs that draw random numbers, run by themselves: eager dropout, initial values."""

UNFUSED: Mapping[str, tuple[Option, ...]] = {
    "cpu": (
        Option(
            "xla_disable_hlo_passes",
            "fusion",
            "a convolution's inputs and result change their layout in copies that need no code of their own, where "
            "fusion makes loops of them: a 3 x 3 one compiles in 13 ms, not 82, its gradient in 25, not 92. Not for "
            "those that XLA makes products of: it would multiply the wrong entries",
        ),
    )
}
"""Of programs that call what XLA cannot look into and else move data, run by themselves: eager convolutions."""


def chosen(
    backend: str, environment: Mapping[str, str], options: Mapping[str, tuple[Option, ...]] = OPTIONS
) -> dict[str, bool | int | str]:
    """The options for a backend that this jaxlib has, less those that the user names in XLA_FLAGS or LIBTPU_INIT_ARGS.

    >>> chosen("cpu", {"XLA_FLAGS": "--xla_disable_hlo_passes=cse"})
    {}
    """
    text = f"{environment.get('XLA_FLAGS', '')} {environment.get('LIBTPU_INIT_ARGS', '')}"
    # QUICK's may be there from this process or the one that started it
    named = {name for name, value in re.findall(r"--(xla_\w+)(?:=(\S*))?", text) if value != QUICK.get(name)}
    here = jaxlib.version.__version_info__[:2]
    of_backend = (o for o in options.get(backend, ()) if o.until is None or here <= o.until)
    return {option.name: option.value for option in of_backend if option.name not in named}


def known(options: Mapping[str, bool | int | str], device: Any = None) -> dict[str, bool | int | str]:
    """The options that the compiler for a device knows, a device of the default backend if None; others are logged.

    Asked by compiling a small program with all of them, and once more for each that is not known.
    """
    place = None if device is None else SingleDeviceSharding(device)
    x = jax.ShapeDtypeStruct((), jnp.float32, sharding=place)
    left = dict(options)
    while left:
        try:
            jax.jit(jnp.negative, compiler_options=left).lower(x).compile()
        except jax.errors.JaxRuntimeError as error:
            gone = _unknown(left, str(error))
            if gone is None:
                raise
            _log.warning("this jaxlib knows no option %s; programs are compiled without it", gone)
            del left[gone]
        else:
            break
    return left


def _unknown(options: Mapping[str, bool | int | str], text: str) -> str | None:
    if "No such compile option" not in text:
        return None
    return next((name for name in options if re.search(rf"\b{name}\b", text)), None)
