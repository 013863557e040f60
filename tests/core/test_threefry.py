"""Random bits on CPU are Threefry's, whatever the number of them, from straight-line code where there are many."""

import jax
import numpy as np
import pytest

from polyreme.core.engine import threefry

MANY = threefry._FEW + 1


def lowered(count):
    return jax.jit(lambda key: jax.random.bits(key, (count,), np.uint32)).lower(jax.random.PRNGKey(0)).as_text()


@pytest.mark.parametrize("count", [1, 7, threefry._FEW, MANY])
def test_bits_are_those_of_the_reference(count):
    key = np.array([0x243F6A88, 0x85A308D3], np.uint32)
    bits = jax.jit(lambda key: jax.random.bits(key, (count,), np.uint32))(key)
    first, second = reference(key, np.zeros(count, np.uint32), np.arange(count, dtype=np.uint32))
    np.testing.assert_array_equal(bits, first ^ second)


def test_the_reference_is_threefry():
    # the known answers of the paper's distribution of code, Random123, for 20 rounds
    ones, pi = 2 * [0xFFFFFFFF], [0x13198A2E, 0x03707344, 0x243F6A88, 0x85A308D3]
    for key, place, answer in (
        ([0, 0], [0, 0], [0x6B200159, 0x99BA4EFE]),
        (ones, ones, [0x1CB996FC, 0xBB002BE7]),
        (pi[:2], pi[2:], [0xC4923A9C, 0x483DF7A0]),
    ):
        words = np.array(place, np.uint32)
        assert [word.item() for word in reference(np.array(key, np.uint32), words[:1], words[1:])] == answer


def test_many_numbers_need_no_loop_and_keys_one():
    assert "stablehlo.while" not in lowered(MANY)
    assert "stablehlo.while" in lowered(2)


def reference(key, high, low):
    """Threefry-2x32 with 20 rounds as its paper writes it."""
    parts = [key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)]
    with np.errstate(over="ignore"):
        high, low = high + parts[0], low + parts[1]
        for number in range(20):
            by = np.uint32([13, 15, 26, 6, 17, 29, 16, 24][number % 8])
            high = high + low
            low = high ^ ((low << by) | (low >> (np.uint32(32) - by)))
            if number % 4 == 3:
                block = number // 4 + 1
                high = high + parts[block % 3]
                low = low + parts[(block + 1) % 3] + np.uint32(block)
    return high, low
