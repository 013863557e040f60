"""XLA's options: known to this jaxlib, left to the user where the user names them, left out where unknown."""

import jax
import jax.numpy as jnp
import pytest

from polyreme.core import backend, xla_flags

TABLES = (xla_flags.OPTIONS, xla_flags.ONE_DEVICE, xla_flags.DRAWING, xla_flags.UNFUSED)
GIVEN = [o for table in TABLES for kind in ("cpu", "gpu") for o in table.get(kind, ())]
COMMON = sorted({(o.name, o.value) for o in GIVEN}, key=str)


@pytest.mark.parametrize(("name", "value"), COMMON)
def test_this_jaxlib_takes_every_option(name, value):
    # the CPU and GPU compilers share one table of options, so both are checked without a GPU; TPU's are its plugin's
    assert xla_flags.is_known(name, value)


def test_an_unknown_option_is_left_out(monkeypatch, caplog):
    gone = xla_flags.Option("xla_cpu_no_such_option", True, "for this test")
    monkeypatch.setitem(xla_flags.OPTIONS, "cpu", (*xla_flags.OPTIONS["cpu"], gone))
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
