"""sdpa_kernel: which kernel of attention runs, and what it refuses; settings of the packed forms that are refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.jit import to_static
from polyreme.kernels import ring_attention, select
from polyreme.kernels.ring_attention import Split
from polyreme.nn import functional as F
from polyreme.nn.attention import SDPBackend, sdpa_kernel

MATH, FLASH, EFFICIENT = SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
X = np.random.default_rng(0).standard_normal((1, 3, 2, 4)).astype("float32")


def attend(x):
    return F.scaled_dot_product_attention(x, x, x, is_causal=True)


@pytest.mark.parametrize("call", [attend, to_static(attend)], ids=["eager", "captured"])
def test_each_choice_gives_the_same_and_flash_alone_is_refused_off_a_gpu(call):
    free = call(to_tensor(X)).numpy()
    for allowed in (MATH, EFFICIENT, [FLASH, MATH]):
        with sdpa_kernel(allowed):
            # sums of 4 products and of 3 probabilities, in another order
            np.testing.assert_allclose(call(to_tensor(X)).numpy(), free, rtol=0, atol=16 * np.finfo("float32").eps * 4)
    with sdpa_kernel(FLASH), pytest.raises(ConfigError, match=r"FLASH_ATTENTION alone .* float32"):
        call(to_tensor(X)).numpy()
    np.testing.assert_array_equal(call(to_tensor(X)).numpy(), free)


def test_the_choice_is_the_kernel_that_runs():
    # the efficient kernel alone brings its own backward, which shows as a custom_vjp call
    def program():
        return str(jax.make_jaxpr(lambda x: attend(to_tensor(x))._array)(jnp.asarray(X)))

    with sdpa_kernel(MATH):
        assert "custom_vjp" not in program()
    with sdpa_kernel([MATH, EFFICIENT]):
        assert "custom_vjp" in program()
    with sdpa_kernel([MATH, EFFICIENT], set_priority=True):
        assert "custom_vjp" not in program()
    assert select.attention_order() == ("efficient",)


@pytest.mark.parametrize("backends", [[], SDPBackend.ERROR, [0], ["math"]])
def test_what_is_no_backend_is_refused(backends):
    with pytest.raises(ConfigError, match="sdpa_kernel: backends="):
        sdpa_kernel(backends)


def test_a_ring_is_refused_where_efficient_attention_is():
    split = Split(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("sep",)), (), ("sep",), ())
    x = jnp.ones((1, 4, 2, 4), "float32")
    with sdpa_kernel(MATH), pytest.raises(ConfigError, match=r"ring_attention: .* not allowed"):
        ring_attention(x, x, x, split=split, causal=True)


CU = np.array([0, 2, 3], "int32")


@pytest.mark.parametrize("setting", [{"qv": X}, {"num_splits": 4}, {"sm_margin": 8}])
def test_a_setting_of_flash_attention_3_that_cannot_be_honoured_is_refused(setting):
    x = to_tensor(X[0])
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} cannot be honoured"):
        F.flash_attention_v3_varlen(x, x, x, to_tensor(CU), to_tensor(CU), 2, 2, **setting)


def test_seeds_and_half_masks_are_refused():
    x = to_tensor(X)
    with pytest.raises(ConfigError, match="rng_name='a'; random numbers come"):
        F.flashmask_attention(x, x, x, rng_name="a")
    with pytest.raises(ConfigError, match="return_seed_offset=True"):
        F.flashmask_attention(x, x, x, return_seed_offset=True)
    with pytest.raises(ConfigError, match="block_mask without"):
        F.flashmask_attention(x, x, x, block_mask=to_tensor(np.ones((1, 1, 1, 1), "int32")))
    bounds = to_tensor(np.full((1, 1, 3, 2), [3, 0], "int32"))
    with pytest.raises(DTypeError, match="block_mask is float32; needs integers, 0 for a block that is hidden"):
        F.flashmask_attention(x, x, x, bounds, block_mask=to_tensor(np.zeros((1, 1, 1, 1), "float32")))
    with pytest.raises(DTypeError, match=r"attn_mask is int64, .* astype\('bool'\) to keep where True"):
        F.scaled_dot_product_attention(x, x, x, attn_mask=to_tensor(np.ones((x.shape[1], x.shape[1]), "int64")))
    with pytest.raises(ShapeError, match=r"block_mask \[1, 1, 2, 1\]; needs"):
        F.flashmask_attention(x, x, x, bounds, block_mask=to_tensor(np.ones((1, 1, 2, 1), "int32")))
