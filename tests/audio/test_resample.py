import tracemalloc

import numpy as np
import pytest
import scipy  # which loads its parts when they are used

from polyreme.audio.resample import resampled
from polyreme.errors import ConfigError, ShapeError


@pytest.mark.parametrize(
    ("rate", "new_rate"),
    [(8_000, 16_000), (44_100, 16_000), (48_000, 16_000), (16_000, 22_050), (44_101, 16_000), (15_999, 16_000)],
)
def test_a_tone_keeps_its_pitch_and_what_is_too_high_is_silent(rate, new_rate):
    """Inside the sound the samples are those of the tone, and near what scipy's filter gives; above the new rate's half
    there is nothing."""
    tone = 1_000.0
    sound = np.sin(2 * np.pi * tone * np.arange(rate // 2) / rate)
    got = resampled(sound, rate, new_rate)
    inner = slice(len(got) // 10, -len(got) // 10)
    want = np.sin(2 * np.pi * tone * np.arange(len(got)) / new_rate)
    np.testing.assert_allclose(got[inner], want[inner], atol=1e-4)
    np.testing.assert_allclose(got[inner], scipy.signal.resample_poly(sound, new_rate, rate)[inner], atol=1e-2)
    assert len(got) == -(-len(sound) * new_rate // rate)
    if new_rate < rate:
        high = np.sin(2 * np.pi * (0.62 * new_rate) * np.arange(rate // 2) / rate)
        assert abs(resampled(high, rate, new_rate)[inner]).max() < 1e-4


def test_memory_is_bounded_for_rates_without_a_common_divisor():
    tracemalloc.start()
    resampled(np.zeros(400_000, np.float32), 383_999, 16_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 128 << 20


def test_what_is_no_sound_is_refused():
    assert resampled(np.zeros(0), 8_000, 16_000).shape == (0,)
    with pytest.raises(ConfigError, match="0 samples a second; give 4000 to 384000"):
        resampled(np.zeros(4), 0, 16_000)
    with pytest.raises(ShapeError, match=r"shape \[4, 2\]; give \[n\]"):
        resampled(np.zeros((4, 2)), 8_000, 16_000)
