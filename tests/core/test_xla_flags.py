"""XLA's options: known to this jaxlib, left to the user where the user names them, left out where unknown."""

import os

import jax
import jax.numpy as jnp
import jaxlib.version
import pytest

from polyreme.core.engine import backend, xla_flags
from polyreme.kernels import select

TABLES = (xla_flags.OPTIONS, xla_flags.ONE_DEVICE, xla_flags.MANY_CORES, xla_flags.DRAWING, xla_flags.UNFUSED)
HERE = jaxlib.version.__version_info__[:2]


@pytest.mark.parametrize("backend_name", ["cpu", "gpu"])
def test_this_jaxlib_takes_every_option(backend_name):
    # the CPU and GPU compilers share one table of options, so both are checked without a GPU; TPU's are its plugin's
    for table in TABLES:
        options = xla_flags.chosen(backend_name, {}, table)
        assert xla_flags.known(options) == options
        later = {o.name for o in table.get(backend_name, ()) if o.until is not None and o.until < HERE}
        assert options.keys() == {o.name for o in table.get(backend_name, ())} - later


def test_an_unknown_option_is_left_out(monkeypatch, caplog):
    gone = xla_flags.Option("xla_cpu_no_such_option", True, "for this test")  # beside one that there is
    monkeypatch.setitem(xla_flags.OPTIONS, "cpu", (*xla_flags.OPTIONS["cpu"], gone))
    monkeypatch.setattr(os, "cpu_count", lambda: select.FEW_CORES)
    backend.step_options_for.cache_clear()
    try:
        options = backend.step_options()
        assert options == {"xla_disable_hlo_passes": "cse_barrier_expander"}
        assert "xla_cpu_no_such_option" in caplog.text
        compiled = jax.jit(lambda x: x + 1, compiler_options=options).lower(jnp.ones(2)).compile()
        assert compiled(jnp.ones(2)).tolist() == [2.0, 2.0]
    finally:
        backend.step_options_for.cache_clear()


def test_options_of_one_device_are_given_where_there_is_one(monkeypatch):
    (option,) = xla_flags.ONE_DEVICE["cpu"]
    for count in (1, 8):
        monkeypatch.setattr(jax, "device_count", lambda count=count: count)
        backend.step_options_for.cache_clear()
        assert (option.name in backend.step_options()) == (count == 1)
    backend.step_options_for.cache_clear()


def test_a_step_is_compiled_by_all_of_many_cores_unless_the_user_says_otherwise(monkeypatch):
    (option,) = xla_flags.MANY_CORES["cpu"]
    ours = f"--{option.name}={xla_flags.QUICK[option.name]}"
    for flags, count, is_given in ((ours, 16, True), (ours, 2, False), (f"--{option.name}=4", 16, False)):
        monkeypatch.setenv("XLA_FLAGS", flags)
        monkeypatch.setattr(os, "cpu_count", lambda count=count: count)
        backend.step_options_for.cache_clear()
        assert (option.name in (backend.step_options() or {})) == is_given
    backend.step_options_for.cache_clear()


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS"])
def test_the_users_own_flags_win(variable):
    name = "xla_tpu_enable_latency_hiding_scheduler"
    assert name in xla_flags.chosen("tpu", {})
    left = xla_flags.chosen("tpu", {variable: f"--other=1 --{name}=false"})
    assert name not in left
    assert len(left) == len(xla_flags.OPTIONS["tpu"]) - 1


def test_every_option_has_a_reason_and_no_name_twice():
    for options in (options for table in TABLES for options in table.values()):
        assert len({o.name for o in options}) == len(options)
        assert all(len(o.reason) > 20 for o in options)
    assert xla_flags.chosen("a plug-in", {}) == {}
