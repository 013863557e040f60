"""Replicas compared: every bit counts, whatever the dtype, and the device that differs is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from polyreme.distributed.placement import clear_plan
from polyreme.errors import NumericsError
from polyreme.recipes.training.replica_check import check_replicas
from tests.recipes.tiny_run import saved, train

VALUES = np.random.default_rng(0).standard_normal((4, 8)).astype("float32")


def placed(spec, values=VALUES, flip=None, memory="device"):
    """values on a mesh of 2 x 2 devices; flip: (device, byte, bit) of one device's copy."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b")), spec, memory_kind=memory)
    array = jax.device_put(values, sharding)
    copies = []
    for part in array.addressable_shards:
        bits = np.array(part.data)
        if flip is not None and part.device == jax.devices()[flip[0]]:
            bits.reshape(-1).view(np.uint8)[flip[1]] ^= 1 << flip[2]
        copies.append(jax.device_put(bits, SingleDeviceSharding(part.device, memory_kind=memory)))
    return jax.make_array_from_single_device_arrays(array.shape, sharding, copies)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64", "int8", "float8_e4m3fn"])
def test_any_flipped_bit_is_seen(dtype):
    values = np.asarray(VALUES, jnp.dtype(dtype))
    check_replicas({"w": placed(PartitionSpec(), values)}, 3)
    nbytes = values.nbytes
    for byte, bit in ((0, 0), (nbytes - 1, 7), (nbytes // 2, 3)):
        with pytest.raises(
            NumericsError, match=r"step 3: .*differ: w \[0:4, 0:8\] on .*2.*, against 3 others. A device"
        ):
            check_replicas(
                {"v": placed(PartitionSpec(), values), "w": placed(PartitionSpec(), values, (2, byte, bit))}, 3
            )


def test_parts_are_compared_with_their_own_replicas():
    split, whole = PartitionSpec("a", "b"), PartitionSpec("a")
    check_replicas({"w": placed(split, flip=(1, 0, 0)), "v": placed(whole)}, 1)  # nobody has the same part
    with pytest.raises(NumericsError, match=r"w \[2:4, 0:8\] between \S+, \S+\."):
        check_replicas({"w": placed(whole, flip=(3, 5, 5))}, 1)


@pytest.mark.parametrize("shape", [(), (0, 3), (4, 8)])
def test_what_is_kept_off_the_devices_and_arrays_without_rows_are_compared_too(shape):
    values = np.ones(shape, np.float32)
    for memory in ("device", "pinned_host"):
        check_replicas({"w": placed(PartitionSpec(), values, memory=memory)}, 1)
        if values.size:
            with pytest.raises(NumericsError, match=r"differ: w .* against 3 others"):
                check_replicas({"w": placed(PartitionSpec(), values, (1, 2, 3), memory)}, 1)


def test_a_run_ends_before_it_saves_what_differs(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "train.flip:raise@7")
    try:
        with pytest.raises(NumericsError, match=r"step 8: replicas of the same values differ: model/norm"):
            train(tmp_path / "run", "plan.dp=8", "plan.sharding=1", "plan.mp=1", "plan.sharding_stage=0",
                  "train.replica_interval=4")  # fmt: skip
        assert saved(tmp_path / "run")[1]["step"] == 5
    finally:
        clear_plan()
