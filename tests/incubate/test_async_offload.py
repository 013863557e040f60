"""Copies to the host's memory and back beside what the devices compute."""

import numpy as np
import pytest

from polyreme import to_tensor
from polyreme.errors import CaptureError, ConfigError, ShapeError
from polyreme.incubate.tensor.manipulation import (
    async_offload,
    async_offload_with_offset,
    async_reload,
    create_async_load,
)
from polyreme.jit import to_static


def test_there_and_back():
    loader, x = create_async_load(), to_tensor(np.arange(6, dtype="float32").reshape(2, 3))
    away, task = async_offload(x, loader)
    task.cpu_wait()
    task.cuda_wait()
    assert task.is_completed()
    assert away.sharding.memory_kind == "pinned_host"
    assert x.sharding.memory_kind == "device"
    back, task = async_reload(away, loader)
    task.cpu_wait()
    assert back.sharding.memory_kind == "device"
    np.testing.assert_array_equal((back * 2).numpy(), x.numpy() * 2)
    x.add_(1.0)
    assert away.numpy()[0, 1] == 1  # a copy


def test_a_part_of_one_goes_into_a_part_of_the_other():
    loader = create_async_load()
    away, _ = async_offload(to_tensor(np.zeros(6, "float32")), loader)
    task = async_offload_with_offset(to_tensor(np.arange(6, dtype="float32")), away, 1, 3, 2, loader)
    task.cpu_wait()
    assert away.sharding.memory_kind == "pinned_host"
    assert away.numpy().tolist() == [0, 0, 0, 1, 2, 0]
    with pytest.raises(ShapeError, match=r"4 elements from 3 on of dst_tensor, whose shape is \[6\]; give a Tensor"):
        async_offload_with_offset(to_tensor(np.zeros(6, "float32")), away, 0, 3, 4, loader)


def test_what_cannot_be_is_refused():
    x = to_tensor([1.0])
    with pytest.raises(ConfigError, match=r"async_offload: async_load is None; give what create_async_load"):
        async_offload(x, None)
    with pytest.raises(ConfigError, match=r"async_reload: a Tensor is copied, got ndarray"):
        async_reload(np.zeros(2), create_async_load())
    with pytest.raises(CaptureError, match="async_offload in a captured function"):
        to_static(lambda t: async_offload(t, create_async_load())[0])(x)
