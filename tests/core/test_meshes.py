"""Which devices hold an array, and copies beside another."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from polyreme.core.meshes import beside, devices_of, everywhere

SPLIT, WHOLE = PartitionSpec("x"), PartitionSpec()


def on(devices, spec=SPLIT, kind=None):
    sharding = NamedSharding(Mesh(np.asarray(devices), ("x",)), spec, memory_kind=kind)
    return jax.device_put(np.arange(4.0, dtype="float32"), sharding)


def test_the_devices_of_an_array():
    devices = jax.devices()
    assert devices_of(jnp.ones(2)) == ()
    assert devices_of(jax.device_put(1.0, devices[3])) == (("cpu", 3),)
    assert devices_of(on(devices[2:4])) == (("cpu", 2), ("cpu", 3)) == devices_of(on([devices[3], devices[2]]))


def test_a_copy_beside_another_is_whole_on_each_device():
    devices = jax.devices()
    here, there = on(devices[:2]), on(devices[2:4], kind="pinned_host")
    copy = beside(here, there)
    assert devices_of(copy) == devices_of(there)
    assert copy.sharding == everywhere(there.sharding)
    assert copy.sharding.memory_kind == "device"
    assert all(shard.data.shape == (4,) for shard in copy.addressable_shards)
    one = beside(here, jax.device_put(1.0, devices[5]))
    assert devices_of(one) == (("cpu", 5),)
    np.testing.assert_array_equal(one, here)


def test_what_fits_already_is_not_copied():
    devices = jax.devices()
    here, free = on(devices[:2]), jnp.ones(4)
    assert beside(here, on(devices[:2], WHOLE)) is here
    assert beside(here, free) is here
    assert beside(free, here) is free
    assert jax.jit(lambda a, b: beside(a, b) + b)(here, here).shape == (4,)
