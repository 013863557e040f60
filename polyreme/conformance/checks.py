"""What a device must do besides computing ops: derivatives, capture, draws, moves, memory, compilation, faults.

A check is a function of the device's Place, run with it as the default device. It raises AssertionError, or whatever
the device raised, where the device fails, Skip where the question does not arise, and may return a note.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from polyreme import nn
from polyreme.autograd import grad
from polyreme.conformance import arithmetic
from polyreme.conformance.case import tolerance
from polyreme.core import dtype as dtypes
from polyreme.core import rng
from polyreme.core.devices.place import CPUPlace, Place, set_device
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import DeviceError
from polyreme.io.serialization import load, save
from polyreme.jit import to_static
from polyreme.kernels import (
    adamw,
    adamw_plain,
    attention,
    attention_plain,
    grouped_matmul,
    grouped_matmul_plain,
    grouped_outer,
    grouped_outer_plain,
    layer_norm,
    layer_norm_plain,
    linear_cross_entropy,
    linear_cross_entropy_plain,
    rms_norm,
    rms_norm_plain,
)
from polyreme.ops import math, random
from polyreme.optimizer import Adam, AdamW

Check = Callable[[Place], str | None]


class Skip(Exception):
    """The check does not concern this device; the text says why."""


def arrays_keep_their_bits(place: Place) -> str:
    """Every dtype goes to the device and back bit for bit."""
    generator = np.random.default_rng(0)
    names = []
    for name in ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
                 "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"):  # fmt: skip
        dtype = dtypes.as_dtype(name)
        raw = generator.integers(0, 2 if name == "bool" else 120, 24 * dtype.itemsize, dtype=np.uint8)
        sent = raw.view(dtype)
        moved = jax.device_put(sent, place.device())
        assert np.asarray(moved).tobytes() == sent.tobytes(), f"{name} came back with other bits"
        names.append(name)
    return f"{len(names)} dtypes"


def products_are_as_declared(place: Place) -> str:
    """Factors of float32 products keep at least the bits that the device declares."""
    declared, measured = arithmetic.factor_bits(place.platform), arithmetic.measured_bits()
    assert measured >= declared - 1, f"declared {declared} bits, measured {measured:.1f}"
    return f"declared {declared} significant bits of a float32 factor, measured {measured:.1f}"


def derivatives_of_high_order(place: Place) -> None:
    """The fourth derivative of sin(2 x) by the tape is 16 sin(2 x)."""
    x = to_tensor(np.linspace(-1, 1, 9), stop_gradient=False)
    y = math.sin(2 * x)
    for _ in range(4):
        (y,) = grad([y.sum()], [x], create_graph=True)
    bound = tolerance(y.dtype, 16) * 16
    np.testing.assert_allclose(y.numpy(), 16 * np.sin(2 * x.numpy()), rtol=0, atol=bound)


def forward_mode_is_reverse_mode(place: Place) -> None:
    """A Jacobian-vector product and a vector-Jacobian product of one function agree."""

    def function(x: jax.Array) -> jax.Array:
        return jnp.tanh(x * x[::-1]).cumsum()

    x, tangent, cotangent = np.random.default_rng(0).standard_normal((3, 16))
    forward = jax.jit(lambda x, t: jax.jvp(function, (x,), (t,))[1])(x, tangent)
    backward = jax.jit(lambda x, c: jax.vjp(function, x)[1](c)[0])(x, cotangent)
    left, right = float(forward @ cotangent), float(backward @ tangent)
    assert abs(left - right) <= tolerance(np.dtype("float64"), 64) * max(1, abs(left)), f"{left} and {right}"


def captured_steps_are_eager_steps(place: Place) -> str:
    """Three steps of AdamW, captured as one program, give the losses of eager ones."""
    eager, losses = _train(captured=False), _train(captured=True)
    bits = arithmetic.factor_bits(place.platform)
    # three steps of two products of 16 terms, forward and backward
    np.testing.assert_allclose(losses, eager, rtol=tolerance(np.dtype("float32"), 64, 2.0 ** (1 - bits)))
    assert losses[2] < losses[0], f"the loss does not fall: {losses}"
    return f"losses {losses[0]:.4f} to {losses[2]:.4f}"


def _train(captured: bool) -> list[float]:
    rng.seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    update = AdamW(1e-2, parameters=net.parameters())
    x, y = np.random.default_rng(0).standard_normal((2, 32, 8)).astype(np.float32)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = ((net(x) - y) ** 2).mean()
        loss.backward()
        update.step()
        update.clear_grad()
        return loss

    run: Any = to_static(step) if captured else step
    inputs = to_tensor(x), to_tensor(y[:, :4].copy())
    return [float(run(*inputs)) for _ in range(3)]


def draws_are_those_of_the_processor(place: Place) -> str:
    """One seed gives the same numbers on the device as on the CPU: bits of integers and uniforms, normals to eps."""
    draws = {
        "uniform": lambda: random.uniform([64], "float32", 0.0, 1.0),
        "randint": lambda: random.randint(0, 1 << 30, [64], "int64"),
        "randperm": lambda: random.randperm(64),
        "normal": lambda: random.standard_normal([64], "float32"),
    }

    def drawn() -> dict[str, np.ndarray]:
        rng.seed(11)
        return {name: draw().numpy() for name, draw in draws.items()}

    here = drawn()
    set_device(CPUPlace())
    try:
        there = drawn()
    finally:
        set_device(place)
    for name in ("uniform", "randint", "randperm"):
        np.testing.assert_array_equal(here[name], there[name], err_msg=name)
    # the inverse error function is computed by each device
    np.testing.assert_allclose(here["normal"], there["normal"], rtol=tolerance(np.dtype("float32"), 8), atol=1e-6)
    return ", ".join(draws)


def fused_kernels_are_their_twins(place: Place) -> str:
    """Each fused kernel and its gradient, in float32 and bfloat16, against the plain twin on the CPU in float64."""
    worst = {}
    for name, (kernel, twin, make, terms) in _KERNELS.items():
        for dtype in ("float32", "bfloat16"):
            args = make(np.random.default_rng(0), dtypes.as_dtype(dtype))
            got = jax.jit(lambda *a, f=kernel: _with_gradient(f, *a))(*args)
            wide = [a.astype(np.float64) if dtypes.is_inexact(np.dtype(a.dtype)) else a for a in args]
            cpu = CPUPlace().device()
            want = jax.jit(lambda *a, f=twin: _with_gradient(f, *a))(*(jax.device_put(a, cpu) for a in wide))
            bits = {"bfloat16": 8, "float32": arithmetic.factor_bits(place.platform)}[dtype]
            error = max(_distance(g, w) for g, w in zip(got, want, strict=True))
            # norm over norm: roundings of factors and results, which add like a random walk over the steps
            bound = 4 * 2.0 ** (1 - bits) * terms**0.5
            assert error <= bound, f"{name} in {dtype}: relative error {error:.2e}, bound {bound:.2e}"
            worst[f"{name} {dtype}"] = error
    name = max(worst, key=lambda k: worst[k])
    return f"{len(worst)} cases, largest relative error {worst[name]:.1e} ({name})"


def _with_gradient(function: Callable, *args: Any) -> list[jax.Array]:
    inexact = [i for i, a in enumerate(args) if jnp.issubdtype(a.dtype, jnp.inexact)]
    out, pull = jax.vjp(lambda *x: function(*_fill(args, inexact, x)), *(args[i] for i in inexact))
    return [*jax.tree.leaves(out), *jax.tree.leaves(pull(jax.tree.map(jnp.ones_like, out)))]


def _fill(args: tuple, places: list[int], values: tuple) -> list:
    changed = dict(zip(places, values, strict=True))
    return [changed.get(i, a) for i, a in enumerate(args)]


def _distance(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(got - want)) / (size or 1.0)


def _normal(*shapes: tuple[int, ...]) -> Callable:
    return lambda r, dtype: [r.standard_normal(s).astype(dtype) for s in shapes]


_SIZES = np.array([70, 0, 130], np.int32)
_KERNELS: dict[str, tuple[Callable, Callable, Callable, int]] = {
    "attention": (
        lambda q, k, v: attention(q, k, v, causal=True),
        lambda q, k, v: attention_plain(q, k, v, causal=True),
        _normal((2, 64, 4, 32), (2, 64, 2, 32), (2, 64, 2, 32)), 16,
    ),
    "grouped_matmul": (
        grouped_matmul, grouped_matmul_plain, lambda r, d: [*_normal((220, 48), (3, 48, 40))(r, d), _SIZES], 4,
    ),
    "grouped_outer": (
        grouped_outer, grouped_outer_plain, lambda r, d: [*_normal((220, 48), (220, 40))(r, d), _SIZES], 4,
    ),
    "layer_norm": (layer_norm, layer_norm_plain, _normal((32, 64), (64,), (64,)), 16),
    "rms_norm": (rms_norm, rms_norm_plain, _normal((32, 64), (64,)), 16),
    "linear_cross_entropy": (
        lambda h, w, y: linear_cross_entropy(h, w, y, reduction="mean"),
        lambda h, w, y: linear_cross_entropy_plain(h, w, y, reduction="mean"),
        lambda r, d: [*_normal((96, 32), (200, 32))(r, d), r.integers(0, 200, 96).astype(np.int32)], 16,
    ),
    # second moments away from 0, where the step's slope is bounded
    "adamw": (
        lambda p, g, m, v: adamw([p], [g], [m], [v * v + 1], step=3, learning_rate=1e-2)[0][0],
        lambda p, g, m, v: adamw_plain([p], [g], [m], [v * v + 1], step=3, learning_rate=1e-2)[0][0],
        _normal((64,), (64,), (64,), (64,)), 16,
    ),
}  # fmt: skip


def checkpoints_move(place: Place) -> str:
    """State that was trained on the device is saved, loaded on the CPU and back, bit for bit, and trains on."""
    rng.seed(5)
    net = nn.Linear(6, 3)
    update = Adam(1e-2, parameters=net.parameters())
    loss = (net(to_tensor(np.ones((2, 6), np.float32))) ** 2).sum()
    loss.backward()
    update.step()
    from_device = {name: value.numpy() for name, value in net.state_dict().items()}
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "state.pdparams"))
        save(net.state_dict(), path)
        set_device(CPUPlace())
        try:
            there = nn.Linear(6, 3)
            there.set_state_dict(load(path))
            save(there.state_dict(), path)
        finally:
            set_device(place)
        back = nn.Linear(6, 3)
        back.set_state_dict(load(path))
    for name, value in back.state_dict().items():
        assert value.numpy().tobytes() == from_device[name].tobytes(), f"{name} came back with other bits"
        assert value.place == place, f"{name} is on {value.place}"
    return f"{len(from_device)} arrays"


def memory_kinds_hold_arrays(place: Place) -> str:
    """An array put in each memory that the device reaches comes back whole."""
    device = place.device()
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    sent = np.arange(12.0)
    for kind in kinds:
        put = jax.device_put(sent, SingleDeviceSharding(device, memory_kind=kind))
        assert put.sharding.memory_kind == kind, f"put in {kind}, is in {put.sharding.memory_kind}"
        np.testing.assert_array_equal(np.asarray(put), sent, err_msg=kind)
    return f"{', '.join(kinds)}; default {device.default_memory().kind}"


def donated_arrays_are_gone(place: Place) -> None:
    """A donated input is deleted, and what comes of it is right."""
    x = jax.device_put(np.arange(1024.0), place.device())
    y = jax.jit(lambda x: x + 1, donate_argnums=0)(x)
    np.testing.assert_array_equal(np.asarray(y), np.arange(1024.0) + 1)
    assert x.is_deleted(), "the donated array is still there: each step would hold its state twice"


def programs_are_cached_on_disk(place: Place) -> str:
    """A compiled program is written to a folder, read back, and computes the same."""
    options = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
               "jax_persistent_cache_min_entry_size_bytes", "jax_enable_compilation_cache")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in options}
    x = np.linspace(0, 1, 7)
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in zip(options, (folder, 0.0, -1, True), strict=True):
                jax.config.update(name, value)
            compilation_cache.reset_cache()
            first = np.asarray(jax.jit(lambda x: jnp.sin(x) * 3.25 + 0.75)(x))
            files = [p for p in Path(folder).rglob("*") if p.is_file()]
            assert files, "nothing was written: the device's programs cannot be serialized"
            jax.clear_caches()
            again = np.asarray(jax.jit(lambda x: jnp.sin(x) * 3.25 + 0.75)(x))
        finally:
            for name, value in before.items():
                jax.config.update(name, value)
            compilation_cache.reset_cache()
    np.testing.assert_array_equal(first, again)
    return f"{sum(p.name.endswith('-cache') for p in files) or len(files)} program(s)"


def the_profiler_traces(place: Place) -> str:
    """A trace of some work is written."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.jit(lambda x: x @ x)(np.ones((64, 64), np.float32)).block_until_ready()
        files = [p for p in Path(folder).rglob("*.xplane.pb") if p.stat().st_size > 0]
        assert files, "no trace was written"
        return f"{files[0].stat().st_size} bytes"


def faults_are_errors(place: Place) -> str:
    """A device that is not there, and more memory than there is, raise errors, and the device works on."""
    try:
        set_device(Place(place.platform, 99))
    except DeviceError:
        pass
    else:
        raise AssertionError(f"{place.platform}:99 was taken")
    try:
        jax.jit(lambda: jnp.ones((1 << 30, 1 << 14), jnp.float32))().block_until_ready()
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        said = str(error).split("\n")[0][:100]
    else:
        raise AssertionError("64 TiB were allocated")
    assert float(jnp.ones(3).sum()) == 3, "the device computes no more after it ran out of memory"
    return said


def collectives_sum_and_exchange(place: Place) -> str:
    """Sums, gathers, scatters, exchanges and permutations over all of the platform's devices, in one program."""
    devices = _all_of(place.platform)
    count = len(devices)
    if count < 2:
        raise Skip("one device")
    mesh = Mesh(np.array(devices), ("x",))
    split = PartitionSpec("x")

    def body(x: jax.Array) -> tuple[jax.Array, ...]:
        ring = [(i, (i + 1) % count) for i in range(count)]
        return (
            lax.psum(x, "x"),
            lax.all_gather(x, "x", tiled=True).sum(keepdims=True) + 0 * x[:1],
            lax.psum_scatter(jnp.repeat(x, count), "x", tiled=True),
            lax.all_to_all(jnp.repeat(x, count), "x", 0, 0, tiled=True),
            lax.ppermute(x, "x", ring),
        )

    numbers = np.arange(1.0, count + 1)
    whole = jax.device_put(numbers, NamedSharding(mesh, split))
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=split, out_specs=(split,) * 5, check_vma=False))
    summed, gathered, scattered, exchanged, turned = map(np.asarray, run(whole))
    total = numbers.sum()
    np.testing.assert_array_equal(summed, np.full(count, total))
    np.testing.assert_array_equal(gathered, np.full(count, total))
    np.testing.assert_array_equal(scattered, np.full(count, total))
    np.testing.assert_array_equal(exchanged, np.tile(numbers, count))
    np.testing.assert_array_equal(turned, np.roll(numbers, 1))
    return f"{count} devices"


def _all_of(platform: str) -> list[Any]:
    devices: list[Any] = []
    while True:
        try:
            devices.append(Place(platform, len(devices)).device())
        except DeviceError:
            return devices


CHECKS: dict[str, Check] = {
    function.__name__: function
    for function in (
        arrays_keep_their_bits,
        products_are_as_declared,
        derivatives_of_high_order,
        forward_mode_is_reverse_mode,
        captured_steps_are_eager_steps,
        draws_are_those_of_the_processor,
        fused_kernels_are_their_twins,
        checkpoints_move,
        memory_kinds_hold_arrays,
        donated_arrays_are_gone,
        programs_are_cached_on_disk,
        the_profiler_traces,
        faults_are_errors,
        collectives_sum_and_exchange,
    )
}
