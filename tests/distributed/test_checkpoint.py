"""CheckpointStore: what is saved comes back bit for bit, on any mesh; what does not fit is refused with reasons."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from polyreme.core import dtype as dtypes
from polyreme.distributed import destroy_process_group, is_initialized
from polyreme.distributed.checkpoint import CheckpointStore, CheckpointVersionError, CheckpointWarning, config_hash
from polyreme.errors import CheckpointError, ConfigError


def bits(array):
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def assert_same_bits(got, want):
    assert got.keys() == want.keys()
    for name, array in want.items():
        assert got[name].dtype == array.dtype, name
        assert got[name].shape == array.shape, name
        np.testing.assert_array_equal(bits(np.asarray(got[name])), bits(np.asarray(array)), err_msg=name)


def mesh(*sizes, names=("dp", "mp")):
    count = int(np.prod(sizes))
    return jax.sharding.Mesh(np.array(jax.devices()[:count]).reshape(sizes), names[: len(sizes)])


def random_bits(seed, shape, dtype):
    """Every bit pattern the dtype has, NaN payloads included; bool gets 0 and 1 only."""
    rng = np.random.default_rng(seed)
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return rng.integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8).view(dtype).reshape(shape)


@pytest.fixture
def store(tmp_path):
    with CheckpointStore(tmp_path / "ckpt") as opened:
        yield opened


STATE = {"layer.weight": np.arange(12.0, dtype=np.float32).reshape(3, 4), "layer.bias": np.zeros(4, np.float32)}


def target_of(arrays, sharding=None):
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for name, a in arrays.items()}


# what comes back


def test_arrays_and_meta_come_back(store):
    meta = {"config": {"lr": 1e-4, "layers": [1, 2]}, "data": {"position": 17}, "host": {"scheduler": {"last": 3}}}
    store.save(3, STATE, meta)
    arrays, got = store.restore()
    assert_same_bits(arrays, STATE)
    assert got == {**meta, "step": 3}


def test_the_newest_step_is_restored_and_any_can_be_asked_for(store):
    for step in (1, 2, 5):
        store.save(step, {"x": np.full(3, step)}, blocking=True)
    assert store.steps() == [1, 2, 5]
    assert store.latest_step() == 5
    assert store.restore()[0]["x"][0] == 5
    assert store.restore(step="latest")[1]["step"] == 5
    assert store.restore(step=2)[0]["x"][0] == 2
    with pytest.raises(CheckpointError, match=r"step 4 is not in .* steps 1, 2, 5"):
        store.restore(step=4)
    with pytest.raises(CheckpointError, match="step '5' is not in"):
        store.restore(step="5")


@pytest.mark.one_in(6)
@pytest.mark.parametrize("dtype", dtypes.NAMES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (8, 4)], ids=str)
def test_every_dtype_and_shape(store, dtype, shape):
    host = random_bits(0, shape, dtype)
    arrays = {"host": host, "device": jax.device_put(host, jax.devices()[0])}
    store.save(1, arrays)
    assert_same_bits(store.restore()[0], arrays)
    got = store.restore(target_of(arrays, NamedSharding(mesh(8, names=("dp",)), P())))[0]
    assert all(isinstance(array, jax.Array) for array in got.values())
    assert_same_bits(got, arrays)


def test_odd_layouts_of_numpy_arrays(store):
    arrays = {
        "strided": np.arange(12)[::3],
        "transposed": np.arange(6).reshape(2, 3).T,
        "swapped": np.arange(3, dtype=">i4"),
    }
    store.save(1, arrays)
    got = store.restore()[0]
    for name, array in arrays.items():
        np.testing.assert_array_equal(got[name], array)
    assert got["swapped"].dtype == np.int32


def test_donating_right_after_save_changes_nothing(store, monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.data:delay=0.2")
    x = jax.device_put(np.arange(1 << 16, dtype=np.float32), NamedSharding(mesh(8, names=("dp",)), P("dp")))
    want = np.array(x)
    store.save(1, {"x": x})
    y = jax.jit(lambda a: a * 0 - 1, donate_argnums=0)(x)
    assert x.is_deleted()
    assert y[0] == -1
    np.testing.assert_array_equal(store.restore()[0]["x"], want)


def test_mutating_numpy_right_after_save_changes_nothing(store, monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.data:delay=0.2")
    x, meta = np.ones(4), {"data": {"position": 1}}
    store.save(1, {"x": x}, meta)
    x[:] = 7
    meta["data"]["position"] = 2
    arrays, got = store.restore()
    np.testing.assert_array_equal(arrays["x"], np.ones(4))
    assert got["data"] == {"position": 1}


# sharding

SPECS = [P(), P("dp"), P(None, "mp"), P("dp", "mp"), P("mp", "dp"), P(("dp", "mp"), None), P(None, ("mp", "dp"))]
LAYOUTS = [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (8, 1), (2, 4), (1, 8)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_reshard_from_eight_devices_is_bit_equal(store, sizes):
    saved, other = mesh(4, 2), mesh(*sizes)
    state = {}
    for name in ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "complex64", "bool"):
        for i, spec in enumerate(SPECS):
            host = random_bits(i, (16, 8), dtypes.NAMES[name])
            state[f"{name}.{i}"] = jax.device_put(host, NamedSharding(saved, spec))
    state["optimizer.moment"] = jax.device_put(random_bits(9, (16,), dtypes.float32), NamedSharding(saved, P("dp")))
    store.save(1, state)
    for shift in (0, 3):  # the same placement on the other mesh, and another one
        target = {
            name: jax.ShapeDtypeStruct(
                array.shape,
                array.dtype,
                sharding=NamedSharding(other, SPECS[(i + shift) % len(SPECS)] if array.ndim > 1 else P()),
            )
            for i, (name, array) in enumerate(state.items())
        }
        got = store.restore(target)[0]
        assert_same_bits(got, state)
        assert all(got[name].sharding == target[name].sharding for name in state)


def test_replicas_are_written_once_and_shards_once(store):
    two = mesh(4, 2)
    state = {
        "replicated": jax.device_put(np.ones((64, 64), np.float32), NamedSharding(two, P())),
        "half": jax.device_put(np.ones((64, 64), np.float32), NamedSharding(two, P(None, "mp"))),
        "whole": jax.device_put(np.ones((64, 64), np.float32), NamedSharding(two, P("dp", "mp"))),
    }
    store.save(1, state)
    store.wait()
    manifest = store.manifest(1)
    assert manifest.nbytes == 3 * 64 * 64 * 4
    assert [len(manifest.tensors[name].chunks) for name in state] == [1, 2, 8]
    assert manifest.tensors["whole"].spec == ["dp", "mp"]
    assert manifest.tensors["whole"].mesh == {"dp": 4, "mp": 2}


def test_only_the_files_needed_are_read(store):
    eight = mesh(8, names=("dp",))
    x = jax.device_put(np.arange(64.0), NamedSharding(eight, P("dp")))
    y = jax.device_put(np.arange(8.0), SingleDeviceSharding(jax.devices()[7]))
    store.save(1, {"x": x, "y": y})
    store.wait()
    (file,) = store.manifest(1).tensors["y"].files
    for data in (store.path / "step_00000001").glob("data-*"):
        if data.name != file:  # every other file is corrupt, of the right size
            data.write_bytes(bytes(data.stat().st_size))
    got = store.restore(target_of({"y": y}), partial=True)[0]
    np.testing.assert_array_equal(got["y"], np.arange(8.0))
    with pytest.raises(CheckpointError, match="tensor 'x'"):
        store.restore(step=1)


# what does not fit


def test_mismatches_are_listed_and_nothing_is_loaded(store):
    store.save(1, {"encoder.weight": np.ones((2, 3), np.float32), "head.bias": np.ones(3, np.float32), "x": np.ones(2)})
    target = {
        "encoder.weihgt": jax.ShapeDtypeStruct((2, 3), np.float32),
        "head.bias": jax.ShapeDtypeStruct((4,), np.float32),
        "x": jax.ShapeDtypeStruct((2,), np.float32),
    }
    with pytest.raises(CheckpointError) as caught:
        store.restore(target)
    text = str(caught.value)
    assert "nothing was loaded; 4 differ" in text
    assert "encoder.weihgt: missing in the checkpoint (nearest name: encoder.weight)" in text
    assert "encoder.weight: unexpected: float32[2, 3]" in text
    assert "head.bias: expected float32[4], the checkpoint has float32[3]" in text
    assert "x: expected float32[2], the checkpoint has float64[2]" in text
    with pytest.warns(CheckpointWarning, match="3 entries not loaded"):
        assert store.restore(target, partial=True)[0] == {}


def test_only_ten_mismatches_are_listed(store):
    store.save(1, {f"w{i}": np.ones(1) for i in range(30)})
    with pytest.raises(CheckpointError, match="30 differ") as caught:
        store.restore({})
    assert len(re.findall("unexpected", str(caught.value))) == 10
    assert "and 20 more" in str(caught.value)


def test_partial_loads_what_fits(store):
    store.save(1, STATE)
    wanted = {**target_of(STATE), "new": jax.ShapeDtypeStruct((1,), np.float32)}
    with pytest.warns(CheckpointWarning, match="new: missing"):
        assert_same_bits(store.restore(wanted, partial=True)[0], STATE)
    only = target_of({"layer.bias": STATE["layer.bias"]})
    assert store.restore(only, partial=True)[0].keys() == {"layer.bias"}


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"x": 1.0}, "'x' is a float"),
        ({"x": np.array(["a"])}, "'x' has dtype <U1"),
        ({"x": np.array([None])}, "'x' has dtype object"),
        ({3: np.ones(1)}, "names of arrays are strings, got 3"),
    ],
    ids=["scalar", "text", "object", "key"],
)
def test_values_that_are_not_saved(store, arrays, text):
    with pytest.raises(CheckpointError, match=text):
        store.save(1, arrays)
    assert store.steps() == []


def test_random_keys_and_deleted_arrays_are_named(store):
    with pytest.raises(CheckpointError, match=r"'key' has dtype key.*key_data"):
        store.save(1, {"key": jax.random.key(0)})
    gone = jnp.ones(3)
    gone.delete()
    with pytest.raises(CheckpointError, match="'gone' was deleted or donated"):
        store.save(1, {"gone": gone})


@pytest.mark.parametrize("meta", [{"lr": float("nan")}, {"t": (1, 2)}, {"d": {1: 2}}, {"a": np.float32(1)}, {"s": {1}}])
def test_meta_that_json_would_change_is_refused(store, meta):
    with pytest.raises(CheckpointError, match="meta of step 1"):
        store.save(1, STATE, meta)


@pytest.mark.parametrize("step", [-1, 1.0, True, "3"])
def test_bad_steps_are_refused(store, step):
    with pytest.raises(CheckpointError, match="needs a whole number"):
        store.save(step, STATE)


def test_meta_of_another_step_is_refused(store):
    with pytest.raises(CheckpointError, match="meta says step 2"):
        store.save(1, STATE, {"step": 2})


# order of steps, retention


def test_saving_at_or_below_the_latest_needs_overwrite(store):
    for step in (10, 20, 30):
        store.save(step, {"x": np.full(2, step)})
    for step in (20, 25, 30):
        with pytest.raises(CheckpointError, match="already has step 30; pass overwrite=True"):
            store.save(step, {"x": np.full(2, -step)})
    store.save(20, {"x": np.full(2, -20)}, overwrite=True)
    store.wait()
    assert store.steps() == [10, 20]  # 30 belonged to the branch that was rolled back
    assert store.restore()[0]["x"][0] == -20
    store.save(21, {"x": np.full(2, 21)})
    assert store.restore()[1]["step"] == 21
    assert not list(store.path.glob("*.*"))


def test_the_newest_and_those_of_keep_period_stay(tmp_path):
    with CheckpointStore(tmp_path, max_to_keep=2, keep_period=4) as store:
        for step in range(1, 11):
            store.save(step, {"x": np.full(2, step)})
        store.wait()
        assert store.steps() == [4, 8, 9, 10]
        assert (tmp_path / "LATEST").read_text() == "step_00000010\n"


@pytest.mark.parametrize("options", [{"max_to_keep": 0}, {"keep_period": -1}, {"max_to_keep": 1.5}])
def test_bad_retention_is_refused(tmp_path, options):
    with pytest.raises(ConfigError, match=f"{next(iter(options))}=.*at least 1"):
        CheckpointStore(tmp_path, **options)


def test_several_processes_must_have_met(tmp_path, monkeypatch):
    if is_initialized():  # by a test of another file, in this process
        destroy_process_group()
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"checkpoints of 2 processes need polyreme.distributed.init_parallel_env"):
        CheckpointStore(tmp_path)


# opening


def test_an_empty_folder_has_no_checkpoint(store):
    assert store.steps() == []
    assert store.latest_step() is None
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        store.restore()


def test_read_only_changes_nothing_and_needs_no_lock(store):
    store.save(1, STATE, blocking=True)
    before = sorted(store.path.rglob("*"))
    with CheckpointStore(store.path, read_only=True) as reader:
        assert_same_bits(reader.restore()[0], STATE)
        with pytest.raises(CheckpointError, match="opened read_only"):
            reader.save(2, STATE)
    assert sorted(store.path.rglob("*")) == before
    with pytest.raises(CheckpointError, match="no checkpoint in"):
        CheckpointStore(store.path / "absent", read_only=True).restore()


def test_saving_after_close_is_refused(store):
    store.close()
    with pytest.raises(CheckpointError, match="is closed"):
        store.save(1, STATE)


# the manifest


def edit(store, step, change):
    path = store.path / f"step_{step:08d}" / "MANIFEST.json"
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


def test_the_manifest_says_what_is_in_it(store):
    config = {"lr": 0.1, "mesh": {"dp": 8}}
    x = jax.device_put(np.ones(8), NamedSharding(mesh(8, names=("dp",)), P("dp")))
    store.save(4, {"x": x}, {"config": config, "data": {"position": 9}}, blocking=True)
    body = json.loads((store.path / "step_00000004" / "MANIFEST.json").read_text())
    assert (body["format_version"], body["step"]) == (1, 4)
    assert body["config_hash"] == config_hash(config)
    assert body["meta"]["config"] == config
    assert body["meta"]["data"] == {"position": 9}
    assert body["meshes"] == [{"dp": 8}]
    assert body["tree_hash"] == store.manifest(4).tree_hash
    assert body["tensors"]["x"]["shape"] == [8]
    assert body["tensors"]["x"]["dtype"] == "float64"
    assert body["tensors"]["x"]["spec"] == ["dp"]
    assert {chunk["file"] for chunk in body["tensors"]["x"]["chunks"]} == {file["name"] for file in body["files"]}


def test_a_newer_format_is_refused_even_if_an_older_step_would_do(store):
    store.save(1, STATE)
    store.save(2, STATE, blocking=True)
    edit(store, 2, lambda body: body.update(format_version=99))
    for call in (store.restore, store.steps, store.latest_step, lambda: store.save(3, STATE)):
        with pytest.raises(CheckpointVersionError, match=r"format_version 99, this polyreme reads up to 1; upgrade"):
            call()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b.update(format_version=0), "format_version is 0"),
        (lambda b: b.update(format_version="1"), "format_version is '1'"),
        (lambda b: b["meta"].update(step=7), "it was altered"),
        (lambda b: b.pop("manifest_hash"), "it was altered"),
    ],
    ids=["old", "text", "meta", "hash"],
)
def test_an_altered_manifest_is_passed_over(store, change, reason):
    store.save(1, STATE)
    store.save(2, STATE, blocking=True)
    edit(store, 2, change)
    assert store.steps() == [1]
    with pytest.warns(CheckpointWarning, match=reason):
        assert store.restore()[1]["step"] == 1


def rehash(body):
    import xxhash  # noqa: PLC0415  (only a forger needs it)

    body.pop("manifest_hash")
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    body["manifest_hash"] = xxhash.xxh3_128_hexdigest(text.encode())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda b: b["files"][0].update(name="../../etc/passwd"), "is not one that a checkpoint has"),
        (lambda b: b["tensors"]["layer.bias"]["chunks"][0].update(nbytes=2**60), "ends beyond"),
        (lambda b: b["tensors"]["layer.bias"]["chunks"][0].update(offset=-4), "is not a whole number"),
        (lambda b: b["tensors"]["layer.bias"].update(shape=[2**50]), "do not tile"),
        (lambda b: b["tensors"]["layer.bias"].update(dtype="object"), "is not a dtype"),
        (lambda b: b["tensors"]["layer.bias"]["chunks"].clear(), "do not tile"),
        (lambda b: b["tensors"]["layer.bias"]["chunks"][0].update(shape=[3]), "has 16 bytes"),
        (lambda b: b.pop("files"), "malformed"),
        (lambda b: b.update(step=3), "is of step 3"),
    ],
)
def test_a_forged_manifest_is_refused(store, change, reason):
    store.save(1, STATE, blocking=True)
    edit(store, 1, lambda body: (change(body), rehash(body)))
    with pytest.raises(CheckpointError, match=reason):
        store.restore(step=1)
