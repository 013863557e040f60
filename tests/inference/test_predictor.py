"""Predictor: handles and lists, buckets, warm-up, clones in threads, devices, and refusals."""

import threading

import numpy as np
import pytest

import polyreme as paddle
from polyreme import export, inference, jit, nn
from polyreme.errors import CheckpointError, ConfigError, DataError, DeviceError, DTypeError, ShapeError
from polyreme.hapi.input_spec import InputSpec


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, shift):
        return {"y": self.linear(x) + shift, "sign": x > 0}


@pytest.fixture(scope="module")
def net():
    paddle.seed(3)
    return Net()


@pytest.fixture(scope="module")
def prefix(net, tmp_path_factory):
    path = tmp_path_factory.mktemp("net") / "net"
    jit.save(net, path, [InputSpec([None, 4], name="x"), InputSpec([3], name="shift")])
    return path


SHIFT = np.float32([1, 2, 3])


def rows(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 4)).astype(np.float32)


def expected(net, x):
    return jit.to_static(Net.forward)(net, paddle.to_tensor(x), paddle.to_tensor(SHIFT))["y"].numpy()


def run_by_handles(predictor, x):
    predictor.get_input_handle("x").copy_from_cpu(x)
    predictor.get_input_handle("shift").copy_from_cpu(SHIFT)
    assert predictor.run() is True
    return predictor.get_output_handle("y").copy_to_cpu()


def test_handles_and_lists_give_what_the_layer_gives(net, prefix):
    predictor = inference.create_predictor(inference.Config(str(prefix)))
    assert predictor.get_input_names() == ["x", "shift"]
    assert predictor.get_output_names() == ["y", "sign"]
    for n in (1, 3):
        x = rows(n)
        want = expected(net, x)
        np.testing.assert_array_equal(run_by_handles(predictor, x), want)
        y, sign = predictor.run([x, paddle.to_tensor(SHIFT)])
        np.testing.assert_array_equal(y.numpy(), want)
        np.testing.assert_array_equal(sign.numpy(), x > 0)


def test_a_handle_tells_its_shape_and_type_and_keeps_its_own_copy(net, prefix):
    predictor = inference.create_predictor(inference.Config(prefix))
    handle, out = predictor.get_input_handle("x"), predictor.get_output_handle("y")
    assert handle.name() == "x"
    assert handle.shape() == [-1, 4]
    assert handle.type() is inference.DataType.FLOAT32
    assert predictor.get_output_handle("sign").type() is inference.DataType.BOOL
    assert handle.lod() == []
    handle.reshape([2, 4])
    x = rows(2)
    want = expected(net, x)
    handle.copy_from_cpu(x)
    predictor.get_input_handle("shift").copy_from_cpu(SHIFT)
    x[:] = 0  # the handle has a copy
    predictor.run()
    assert out.shape() == [2, 3]
    np.testing.assert_array_equal(out.copy_to_cpu(), want)
    np.testing.assert_array_equal(out.to_tensor().numpy(), want)
    handle.reshape([2, 4])
    assert handle.copy_to_cpu().shape == (2, 4)


def test_shared_arrays_are_not_copied(net, prefix):
    predictor = inference.create_predictor(inference.Config(prefix))
    handle = predictor.get_input_handle("x")
    predictor.get_input_handle("shift").share_external_data(SHIFT)
    tensor = paddle.to_tensor(rows(2))
    handle.share_external_data(tensor)
    assert handle.array is tensor._array
    predictor.run()
    np.testing.assert_array_equal(predictor.get_output_handle("y").copy_to_cpu(), expected(net, rows(2)))
    x = rows(2, 1)
    handle.share_external_data(x)
    assert handle.array is x


def test_batch_buckets_pad_up_cut_back_and_are_all_that_is_compiled(net, prefix):
    config = inference.Config(prefix)
    config.enable_batch_buckets([4, 1, 2])
    assert config.batch_buckets == (1, 2, 4)
    predictor = inference.create_predictor(config)
    assert predictor.warm_up() == 3
    for n in (1, 2, 3, 4):
        y, sign = predictor.run([rows(n), SHIFT])
        assert sign.shape == [n, 4]
        # the same product of 4 terms for another number of rows
        np.testing.assert_allclose(y.numpy(), expected(net, rows(n)), rtol=4 * np.finfo(np.float32).eps, atol=1e-6)
    compiled = predictor._engine.num_compiled
    predictor.run([rows(3, 9), SHIFT])
    assert predictor._engine.num_compiled == compiled
    with pytest.raises(ShapeError, match="a batch of 5, but the largest bucket is 4"):
        predictor.run([rows(5), SHIFT])


def test_padding_that_would_change_results_is_refused(tmp_path):
    def refused(fn, spec, message):
        jit.save(jit.to_static(fn), tmp_path / "m", [spec])
        config = inference.Config(tmp_path / "m")
        config.enable_batch_buckets([4])
        with pytest.raises(ConfigError, match=message):
            inference.create_predictor(config)

    refused(lambda x: x.mean(), InputSpec([None, 4]), r"output output_0 float32\[\] is not one row per sample")
    refused(lambda x: x.reshape([-1]), InputSpec([None, 4]), r"float32\[4\*batch\] is not one row per sample")
    refused(lambda x: x, InputSpec([2, 4]), "no input of .* has an open batch dim")


def test_warm_up_needs_sizes_only_for_other_open_dims(prefix, tmp_path):
    predictor = inference.create_predictor(inference.Config(prefix))
    assert predictor.warm_up() == 1
    assert predictor.warm_up([{"x": [5, 4], "shift": [3]}]) == 2
    with pytest.raises(ConfigError, match=r"shapes for \['x'\], the inputs are"):
        predictor.warm_up([{"x": [5, 4]}])
    jit.save(nn.ReLU(), tmp_path / "m", [InputSpec([None, None], name="x")])
    with pytest.raises(ConfigError, match=r"dim 1 of input 'x' is open.*warm_up\(\[\{'x'"):
        inference.create_predictor(inference.Config(tmp_path / "m")).warm_up()


def test_clones_in_threads_share_weights_and_programs_and_nothing_else(net, prefix):
    pool = inference.PredictorPool(inference.Config(prefix), 4)
    assert pool.retrieve(0)._engine is pool.retrieve(3)._engine
    failures = []

    def work(index):
        predictor = pool.retrieve(index)
        for turn in range(20):
            x = rows(1 + (index + turn) % 2, seed=index)
            if not np.array_equal(run_by_handles(predictor, x), wanted[index, len(x)]):
                failures.append((index, turn))

    wanted = {(i, n): expected(net, rows(n, seed=i)) for i in range(4) for n in (1, 2)}
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures
    assert pool.retrieve(0)._engine.num_compiled == 2
    with pytest.raises(IndexError, match=r"retrieve\(4\): there are 4, from 0"):
        pool.retrieve(4)
    with pytest.raises(ConfigError, match="size=0; give a whole number"):
        inference.PredictorPool(inference.Config(prefix), 0)


def test_memory_is_let_go(prefix):
    predictor = inference.create_predictor(inference.Config(prefix))
    run_by_handles(predictor, rows(2))
    held = 4 * (2 * 4 + 3 + 2 * 3) + 2 * 4  # float32 inputs and output, bool output
    assert predictor.try_shrink_memory() == held
    with pytest.raises(DataError, match="run: no value for input x, shift"):
        predictor.run()
    with pytest.raises(DataError, match="'y' has no value yet; call run"):
        predictor.get_output_handle("y").copy_to_cpu()
    with pytest.raises(DataError, match="'x' has no value yet; copy_from_cpu"):
        predictor.get_input_handle("x").copy_to_cpu()


def test_values_that_do_not_fit_name_the_input(prefix):
    predictor = inference.create_predictor(inference.Config(prefix))
    handle = predictor.get_input_handle("x")
    with pytest.raises(DTypeError, match="input 'x' is float32, got float64"):
        handle.copy_from_cpu(np.ones((1, 4)))
    with pytest.raises(TypeError, match="input 'x' takes an ndarray, got list"):
        handle.copy_from_cpu([1.0])
    with pytest.raises(ConfigError, match="'y' is an output"):
        predictor.get_output_handle("y").copy_from_cpu(SHIFT)
    with pytest.raises(ShapeError, match=r"reshape\(\[1, 5\]\): x float32\[batch, 4\] does not take"):
        handle.reshape([1, 5])
    with pytest.raises(ConfigError, match="pad sequences"):
        handle.set_lod([[0, 1]])
    with pytest.raises(ConfigError, match="there is no input 'X'; did you mean 'x'"):
        predictor.get_input_handle("X")
    with pytest.raises(ShapeError, match="input 'x' has size 5 in dim 1, which takes 4"):
        predictor.run([np.ones((2, 5), np.float32), SHIFT])
    with pytest.raises(DTypeError, match="input 'x' is float64"):
        predictor.run([np.ones((2, 4)), SHIFT])
    with pytest.raises(TypeError, match="run takes Tensors and arrays, got list"):
        predictor.run([[1.0], SHIFT])
    for hook in (predictor.register_input_hook, predictor.register_output_hook):
        with pytest.raises(ConfigError, match="no ops to watch"):
            hook(print)
    with pytest.raises(ConfigError, match="XLA has its own streams"):
        predictor.clone(stream=object())


def test_a_config_says_its_device(prefix, tmp_path):
    config = inference.Config(prefix)
    config.enable_use_gpu(100, 1)
    assert config.use_gpu()
    assert config.gpu_device_id() == 1
    assert config.memory_pool_init_size_mb() == 100
    with pytest.raises(DeviceError, match="no gpu is available"):
        inference.create_predictor(config)
    config.disable_gpu()
    config.enable_custom_device("cpu", 1)  # one of the virtual devices of these tests
    predictor = inference.create_predictor(config)
    x = paddle.to_tensor(rows(2))
    (y, _) = predictor.run([x, SHIFT])
    assert y.place.index == 1
    export.write(tmp_path / "m", lambda s, x: [x[0]], {}, [InputSpec([2], name="x")], ["y"], platforms=("cuda",))
    with pytest.raises(DeviceError, match=r"was exported for cuda, not for cpu; export it with platforms=\('cpu',\)"):
        inference.create_predictor(inference.Config(tmp_path / "m"))
    with pytest.raises(ConfigError, match="keeps its dtypes"):
        config.enable_use_gpu(100, 0, inference.PrecisionType.Half)
    with pytest.raises(ConfigError, match="keeps its dtypes"):
        config.enable_custom_device("tpu", 0, inference.PrecisionType.Half)


def test_ways_to_name_an_artefact(prefix, tmp_path):
    for model, params in (
        (f"{prefix}.json", f"{prefix}.safetensors"),
        (f"{prefix}.pdmodel", f"{prefix}.pdiparams"),
        (prefix.parent, None),
        (inference.Config(prefix), None),
    ):
        assert inference.Config(model, params).prefix == prefix
    config = inference.Config()
    with pytest.raises(ConfigError, match="no model is set"):
        inference.create_predictor(config)
    config.set_prog_file(f"{prefix}.json")
    config.set_params_file(f"{prefix}_other.safetensors")
    assert (config.prog_file(), config.params_file(), config.model_dir()) == (
        f"{prefix}.json", f"{prefix}_other.safetensors", "",
    )  # fmt: skip
    with pytest.raises(ConfigError, match="are of two artefacts"):
        inference.create_predictor(config)
    with pytest.raises(CheckpointError, match=r"holds 0 artefacts \(none\)"):
        inference.create_predictor(inference.Config(tmp_path))
