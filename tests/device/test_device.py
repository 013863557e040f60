"""Devices: which, where new Tensors go, memory, queues; eight virtual processors, and made-up facts of GPUs."""

import types

import jax
import numpy as np
import pytest

import polyreme
from polyreme import cuda, device, version
from polyreme.core.devices.place import CPUPlace, Place
from polyreme.device import chosen, facts, memory, queue, xpu
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DeviceError


@pytest.fixture(autouse=True)
def _where_it_was():
    before = jax.config.jax_default_device
    yield
    jax.config.update("jax_default_device", before)
    queue._current.stream = None


@pytest.fixture
def gpu(monkeypatch):
    """A device that says of itself what jax's GPUs do."""
    stats = {"bytes_in_use": 100, "peak_bytes_in_use": 300, "pool_bytes": 500, "bytes_limit": 1000}
    made = types.SimpleNamespace(
        memory_stats=lambda: dict(stats), device_kind="H100", compute_capability="9.0", core_count=132
    )
    monkeypatch.setattr(Place, "device", lambda self: made)
    monkeypatch.setattr(memory, "_peaks", memory._Peaks())
    return stats


def test_every_name_is_there():
    for module in (device, device.cuda, device.xpu, cuda):
        for name in module.__all__:
            assert getattr(module, name) is not None


def test_new_tensors_go_where_the_block_says():
    with device.device(2):
        assert device.get_device() == "cpu:2" or device.get_device() == "cpu"
        assert next(iter(to_tensor([1.0])._array.devices())) == jax.devices()[2]
        with device.device_guard("cpu:1"), device.device(None), device.device(-1):
            assert next(iter(to_tensor([1.0])._array.devices())) == jax.devices()[1]
        assert next(iter(to_tensor([1.0])._array.devices())) == jax.devices()[2]
    assert device.get_device(to_tensor([1.0])) == -1
    assert polyreme.get_device(to_tensor([1.0])) == -1
    assert device.set_device(CPUPlace(3)) == CPUPlace(3)
    assert device.set_device(3).index == 3
    assert cuda.current_device() == 3
    with pytest.raises(DeviceError, match="there are 8 cpu devices"):
        device.set_device(8)


def test_a_device_is_named_by_calling_the_module():
    cpu = polyreme.device("cpu", 1)
    assert (cpu, cpu.type, cpu.index) == ("cpu:1", "cpu", 1)
    assert (polyreme.device("cuda:2").index, polyreme.device("cpu").index, polyreme.device(CPUPlace())) == (
        2,
        None,
        "cpu",
    )
    assert polyreme.zeros([1], device=cpu).place == to_tensor([1.0]).to(cpu).place == CPUPlace(1)
    with cpu, polyreme.device("cpu"):
        assert to_tensor([1.0]).place == CPUPlace(0)
    with pytest.raises(DeviceError, match="the index is said twice"):
        polyreme.device("cuda:0", 0)
    with pytest.raises(DeviceError, match="'gpu:x' is not a device"):
        polyreme.device("gpu:x")
    with pytest.raises(TypeError, match="'module' object is not callable"):
        polyreme.nn()


def test_what_there_is():
    assert device.get_all_device_type() == device.get_all_custom_device_type() == []
    assert device.get_available_custom_device() == []
    assert not any([device.is_available(), cuda.is_available(), cuda.is_initialized(), device.is_compiled_with_rocm()])
    assert not any([device.is_compiled_with_xpu(), device.is_compiled_with_ipu(), device.is_compiled_with_cinn()])
    assert device.is_compiled_with_distribute()
    assert not device.is_compiled_with_custom_device("npu")
    assert (cuda.device_count(), device.cuda.device_count(), xpu.device_count()) == (0, 0, 0)
    assert device.is_bf16_supported()
    assert device.is_bf16_supported(including_emulation=False) in (True, False)
    assert not device.is_current_stream_capturing()


def test_a_processor_has_no_compute_capability():
    found = device.get_device_properties()
    assert found.name == device.get_device_name()
    assert found.total_memory > found.multi_processor_count > 0
    with pytest.raises(DeviceError, match=r"Place\(cpu\) is no GPU with a compute capability"):
        device.get_device_capability()


def test_facts_of_a_gpu(gpu):
    found = device.get_device_properties("gpu:0")
    assert found == facts.DeviceProperties("H100", 1000, 132, 9, 0)
    assert cuda.get_device_capability("gpu:0") == (9, 0)
    assert cuda.get_device_name("gpu:0") == "H100"
    assert cuda.mem_get_info("gpu:0") == (900, 1000)


def test_peaks_of_a_device_that_keeps_its_own(gpu):
    where = "gpu:0"
    assert (cuda.memory_allocated(where), cuda.max_memory_allocated(where)) == (100, 300)
    assert (cuda.memory_reserved(where), device.max_memory_reserved(where)) == (500, 500)
    cuda.reset_peak_memory_stats(where)
    assert cuda.max_memory_allocated(where) == 100
    gpu["bytes_in_use"] = 200
    assert cuda.max_memory_allocated(where) == 200
    gpu.update(bytes_in_use=10, peak_bytes_in_use=400)
    assert cuda.max_memory_allocated(where) == 400
    table = device.cuda.memory_summary(where)
    assert "allocated" in table
    assert "400" in table


def test_memory_of_a_processor_is_of_the_arrays_that_are_alive():
    before = device.memory_allocated()
    device.reset_max_memory_allocated()
    device.reset_max_memory_reserved()
    x = to_tensor(np.zeros(1 << 16, "float32"))
    same = to_tensor(x)._array
    assert device.memory_allocated() - before == 2 * 4 << 16
    also = x._array
    assert device.memory_reserved() - before == 2 * 4 << 16
    del x, also, same
    device.empty_cache()
    device.ipc_collect()
    assert device.memory_allocated() <= before + 4096  # bytes; other tests' scalars may come and go
    assert device.max_memory_allocated() - before == 2 * 4 << 16
    free, total = cuda.mem_get_info()
    assert 0 < free < total


def test_events_time_and_streams_wait():
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    stream = device.current_stream()
    with pytest.raises(DeviceError, match="two events of Event"):
        start.elapsed_time(end)
    start.record()
    x = to_tensor(np.ones((300, 300), "float32"))
    for _ in range(20):
        x = x @ x * 1e-3
    end.record(stream)
    assert 0 < start.elapsed_time(end) < 60_000
    plain = stream.record_event()
    plain.synchronize()
    plain.wait()
    assert plain.query()
    stream.synchronize()
    assert stream.query()
    stream.wait_event(plain)
    stream.wait_stream(device.Stream("cpu:1"))
    device.synchronize()
    cuda.synchronize("cpu:1")
    assert repr(stream) == "Stream(Place(cpu))"


def test_the_current_stream_of_a_block():
    other = device.Stream("cpu:1")
    with device.stream_guard(other), device.StreamContext(None):
        assert device.current_stream() == other
        assert next(iter(to_tensor([1.0])._array.devices())) == jax.devices()[1]
    assert device.current_stream() == device.Stream()
    before = device.set_stream(other)
    assert device.set_stream(before) == other
    assert len({other, device.Stream("cpu:1"), before}) == 2
    assert cuda.stream is device.StreamContext


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: device.Event(interprocess=True), ConfigError, "interprocess=True"),
        (lambda: device.Stream(stream_base=1), ConfigError, "stream_base wraps a vendor's handle"),
        (lambda: device.Stream(priority=7), ConfigError, "priority=7"),
        (lambda: device.set_stream(1), TypeError, "takes a Stream, got int"),
        (lambda: device.stream_guard(1), TypeError, "takes a Stream, got int"),
        (lambda: device.get_stream_from_external(16), NotImplementedError, "0x10"),
        (lambda: device.XPUPlace(0), DeviceError, "no backend for Kunlun"),
        (lambda: device.IPUPlace(), DeviceError, "no backend for Graphcore"),
        (lambda: device.cuda.vmm_compact(), NotImplementedError, "does not move"),
        (lambda: xpu.memory_used(), DeviceError, r"polyreme\.device\.memory_allocated speaks"),
        (lambda: xpu.synchronize(), DeviceError, r"polyreme\.device\.synchronize speaks"),
        (lambda: xpu.set_debug_level(1), DeviceError, "POLYREME_DEBUG"),
        (lambda: cuda.cudart(), NotImplementedError, "belongs to XLA"),
        (lambda: cuda.check_error(2), DeviceError, "error 2"),
    ],
)
def test_what_belongs_to_a_vendor_says_so(call, error, match):
    with pytest.raises(error, match=match):
        call()
    assert cuda.check_error(0) is None


def test_seeds_and_states_are_of_one_generator():
    cuda.manual_seed_all(5)
    kept = cuda.get_rng_state()
    device.set_rng_state(kept)
    np.testing.assert_array_equal(device.get_rng_state()[0], kept[0])


def test_tensors_by_class():
    assert device.FloatTensor([1, 2]).dtype == np.float32
    assert device.LongTensor([1.5]).tolist() == [1]
    assert device.HalfTensor(2, 3).shape == [2, 3]
    assert device.BFloat16Tensor().shape == [0]
    assert isinstance(device.BoolTensor([1, 0]), cuda.BoolTensor)
    assert not isinstance(to_tensor([1.0]), cuda.DoubleTensor)
    assert device.IntTensor(to_tensor([2.0])).dtype == np.int32
    with pytest.raises(TypeError, match="got 2 arguments"):
        device.CharTensor([1], [2])
    with pytest.raises(TypeError, match="a device; use to_tensor"):
        device.ByteTensor([1], device="cpu")


def test_versions_are_those_of_installed_packages(monkeypatch, capsys):
    assert (version.cuda(), version.cudnn(), version.nccl(), version.cuda_archs()) == ("False", "False", "0", [])
    assert device.get_cudnn_version() is None
    assert {version.xpu(), version.xpu_xre(), version.xpu_xccl(), version.xpu_xhpc()} == {"False"}
    assert version.tensorrt() == "None"
    found = {"jax-cuda12-plugin": "0.10", "nvidia-cudnn-cu12": "9.1.0.70", "nvidia-cuda-runtime-cu12": "12.8"}
    monkeypatch.setattr(version, "_version", lambda *names: next((found[n] for n in names if n in found), None))
    assert (version.cuda(), version.cudnn(), version.nccl()) == ("12.8", "9.1.0.70", "unknown")
    assert device.get_cudnn_version() == 90100
    version.show()
    assert "cudnn 9.1.0.70" in capsys.readouterr().out


def test_indices_count_on_the_default_platform():
    assert chosen.place_of(1) == Place("cpu", 1)
