"""Every name of PaddlePaddle that scripts import resolves; one that is absent says so when it is used."""

import importlib
import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import polyreme
from polyreme.errors import AbsentError, ConfigError, DTypeError, NotReadyError, ProgramError, ShapeError
from polyreme.paddle_scripts import as_paddle, lookup
from polyreme.paddle_scripts.names import CLASSES, NAMES, REASONS
from polyreme.stand_ins import Absent

PROJECT_NAMES = Path(__file__).parent / "project_names.txt"


@pytest.fixture(scope="module", autouse=True)
def _as_paddle():
    with as_paddle():
        yield


def value_at(path):
    """What `paddle.<path>` is, by attributes where they are there and by imports where not."""
    module, _, name = path.rpartition(".")
    owner = importlib.import_module(f"paddle.{module}" if module else "paddle")
    return getattr(owner, name)


def test_every_name_of_the_table_is_what_the_table_says():
    wrong = [path for path, target in NAMES.items() if value_at(path) is not lookup.fetch(target)]
    assert [path for path in wrong if value_at(path) != lookup.fetch(NAMES[path])] == []
    assert [path for path in NAMES if isinstance(value_at(path), Absent)] == []


def test_every_absent_path_can_be_imported_and_is_absent():
    for path in REASONS:
        if lookup.is_module(path):
            importlib.import_module(f"paddle.{path}")
        else:
            assert isinstance(value_at(path), Absent), path


def test_every_name_that_paddle_has_can_be_imported():
    modules = {f"paddle.{m}": names for m, names in lookup.internal_names().items()}
    modules |= {m: names for m, names in lookup.paddle_names().items() if ".fluid" not in m}
    for module, names in modules.items():
        for name in names:
            getattr(importlib.import_module(module), name)


def test_every_name_that_projects_use_resolves_by_attributes_alone():
    module = ""
    for line in PROJECT_NAMES.read_text().splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            module = line
            continue
        for name in line.split():
            value = polyreme
            for part in f"{module}.{name}".split(".")[1:]:
                value = getattr(value, part)


def test_names_that_a_module_imports_are_those_of_the_module_that_defines_them():
    from paddle.base.framework import in_dynamic_or_pir_mode
    from paddle.fluid.core import eager, ops
    from paddle.fluid.core_avx import Place
    from paddle.fluid.reader import _DatasetKind
    from paddle.framework.io import _unpack_saved_dict
    from paddle.nn.functional import conv

    assert conv.in_dynamic_or_pir_mode is in_dynamic_or_pir_mode
    assert issubclass(polyreme.CPUPlace, Place)
    assert isinstance(ops.relu(eager.Tensor(np.float32([-1.0]))), polyreme.Tensor)
    assert isinstance(_unpack_saved_dict, Absent)
    with pytest.raises(AbsentError, match=r"paddle\.framework\.io_utils\._unpack_saved_dict"):
        _unpack_saved_dict({}, 2)
    loader = polyreme.io.DataLoader([1, 2], batch_size=None)
    assert (loader.dataset_kind, loader.auto_collate_batch) == (_DatasetKind.MAP, False)


def test_classes_of_tensors_say_that_they_are_paddles():
    """Libraries of several frameworks (autoray, opt_einsum) choose theirs so."""
    import paddle

    layer = paddle.nn.Linear(2, 2)
    assert str(type(paddle.ones([1]))) == "<class 'paddle.Tensor'>"
    assert type(layer.weight).__module__ == "paddle.base.framework"
    assert [pickle.loads(pickle.dumps(cls)) for cls in (paddle.Tensor, type(layer.weight))] == [
        paddle.Tensor,
        type(layer.weight),
    ]


def test_bytes_of_files_are_read_in_any_dtype():
    """As safetensors.paddle reads them."""
    from paddle.base import core

    stored = core.frombuffer(np.float32([1, 2]).tobytes(), polyreme.float32)
    np.testing.assert_array_equal(stored, [1, 2])
    flags = core.frombuffer(b"\0\1\2", polyreme.uint8).view(polyreme.bool)
    assert flags.tolist() == [False, True, True]
    assert flags.view("uint8").tolist() == [0, 1, 1]


def test_modules_list_their_names():
    """Scripts look classes up by name: `module.__dict__`, vars and dir."""
    import paddle

    module = paddle.nn.layer.activation
    by_name = {name.lower(): name for name in module.__dict__}
    assert getattr(module, by_name["leakyrelu"]) is paddle.nn.LeakyReLU
    assert vars(module)["ReLU"] is paddle.nn.ReLU
    assert {"ReLU", "Silu"} <= set(dir(module))
    assert not [n for n, v in vars(paddle.base.core).items() if "absent" in repr(v)]


def test_what_is_absent_says_so_when_it_is_used_and_may_be_derived_from():
    from paddle.static.quantization import PostTrainingQuantization

    class Mine(PostTrainingQuantization, polyreme.nn.Layer):
        pass

    with pytest.raises(AbsentError, match=r"paddle.*quantization.*: polyreme does not have it; use paddle.quant"):
        Mine()
    assert not isinstance(3, PostTrainingQuantization)
    with pytest.raises(AbsentError, match=r"paddle.distributed.QueueDataset: .* no parameter servers here"):
        polyreme.distributed.QueueDataset()
    with pytest.raises(AttributeError, match=r"'x' of paddle.pir.Value: "):
        _ = value_at("pir.Value").x
    for core in ("core", "base.core", "base.libpaddle", "framework.core"):
        with pytest.raises(AbsentError, match=r"\.ProgramDesc: .* inside of PaddlePaddle's compiler"):
            value_at(f"{core}.ProgramDesc")()
        with pytest.raises(AbsentError, match=r"\.CUDAGraph: .* private to PaddlePaddle"):
            value_at(f"{core}.CUDAGraph")()
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        value_at("tensor.no_such_name")


def test_what_subclasses_of_samplers_and_trainers_read_of_places():
    import paddle

    assert paddle.io.BatchSampler(dataset=range(3))._acc_steps == 1
    place = paddle.ones([1]).place
    assert place._equals(paddle.CPUPlace())
    assert not place.is_xpu_pinned_place()


def test_private_names_of_initializers_are_their_settings_and_free_for_subclasses():
    import paddle
    from paddle.nn.initializer import Constant, Initializer, KaimingNormal, Normal

    normal = Normal(1.0, 2.0)
    normal._std_dev = 0.0
    assert (Constant(2.0)._value, normal._mean, normal(paddle.zeros([2])).tolist()) == (2, 1, [1, 1])
    assert (KaimingNormal()._compute_fans(paddle.ones([4, 5])), hasattr(normal, "_value")) == ((4, 5), False)
    assert paddle.regularizer.L2Decay(0.25)._coeff == 0.25

    class Mine(Initializer):
        def __init__(self, value):
            self._value = value

        def forward(self, param, block=None):
            return param.fill_(self._value)

    assert Mine(3.0)(paddle.zeros([1])).tolist() == [3]


def test_devices_and_autocast_by_the_names_of_other_frameworks():
    import paddle
    from paddle.cuda.amp import autocast

    paddle.set_default_device("cpu")
    with autocast(dtype="bfloat16"):
        assert paddle.matmul(paddle.ones([2, 2]), paddle.ones([2, 2])).dtype == "bfloat16"
    with paddle.cuda.amp.autocast_mode.autocast(enabled=False):
        assert paddle.matmul(paddle.ones([2, 2]), paddle.ones([2, 2])).dtype == "float32"
    assert paddle.nn.functional.pdist(paddle.to_tensor([[0.0], [3.0]])).tolist() == [3]


def test_gradients_beside_16_bit_parameters_are_added_up_in_float32():
    import paddle
    from paddle.distributed.fleet.utils import mix_precision_utils as utils

    model = paddle.nn.Linear(2, 2).astype("bfloat16")
    wrapped = utils.MixPrecisionLayer(model, dtype="bfloat16")
    optimizer = utils.MixPrecisionOptimizer(paddle.optimizer.SGD(0.5, parameters=model.parameters()))
    for _ in range(2):
        wrapped(paddle.ones([1, 2], "bfloat16")).sum().backward()
    assert (model.weight.grad.dtype, model.weight.grad.tolist()) == ("float32", [[2, 2], [2, 2]])
    before = model.bias.tolist()
    optimizer.step()
    assert model.bias.tolist() == [b - 1 for b in before]
    assert list(wrapped.state_dict()) == ["weight", "bias"]


@dataclass
class Progress:
    """What a trainer knows of its run."""

    step: int = 0
    history: list = field(default_factory=list)

    def count(self):
        return len(self.history)


def test_settings_are_loaded_as_objects_of_imported_classes(tmp_path):
    import paddle

    paddle.save({"state": Progress(3, [Progress(1)])}, tmp_path / "state")
    state = paddle.load(tmp_path / "state")["state"]
    assert (type(state), state.count(), type(state.history[0])) == (Progress, 1, Progress)


def test_sharded_state_dicts_of_models_and_optimizers(tmp_path):
    import paddle
    from paddle.distributed.flex_checkpoint.dcp.full_param import full_param

    def trained(steps):
        paddle.seed(0)
        with paddle.utils.unique_name.guard():
            model = paddle.nn.Sequential(paddle.nn.Linear(2, 3))
            optimizer = paddle.optimizer.AdamW(0.1, parameters=model.parameters())
        for _ in range(steps):
            model(paddle.ones([1, 2])).square().sum().backward()
            optimizer.step()
            optimizer.clear_grad()
        optimizer._create_accumulators()
        weights = model.sharded_state_dict()
        return model, optimizer, {**weights, **optimizer.sharded_state_dict(weights)}

    model, optimizer, held = trained(3)
    assert list(held)[:3] == ["0.weight", "0.bias", "0.weight.moment1_0"]
    paddle.distributed.save_state_dict(held, tmp_path)
    assert paddle.load(tmp_path / "0.metadata").state_dict_metadata["0.bias"][0].global_shape == (3,)
    again, other, empty = trained(0)
    paddle.distributed.load_state_dict(empty, tmp_path)
    for net, opt in ((model, optimizer), (again, other)):
        net(paddle.ones([1, 2])).square().sum().backward()
        opt.step()
    assert again[0].weight.tolist() == model[0].weight.tolist()
    renamed = dict(model.full({"aoa_statements": ["0.weight^T -> w", "0.bias -> _"]}))
    assert [(key, t.tolist()) for key, t in renamed.items()] == [("w", model[0].weight.t().tolist())]
    assert [key for key, _ in full_param(model.sharded_state_dict())] == ["0.weight", "0.bias"]


def test_attributes_of_programs_and_parameters():
    import paddle
    from paddle.base.framework import EagerParamBase

    weight = EagerParamBase.from_tensor(paddle.to_tensor([1.0, 2.0]), trainable=False, name="from_tensor")
    assert (weight.tolist(), weight.trainable, weight.name) == ([1, 2], False, "from_tensor")
    assert EagerParamBase.from_tensor(weight, need_clip=False).need_clip is False
    with pytest.raises(ConfigError, match="'clip' is no setting of a Parameter"):
        EagerParamBase.from_tensor(weight, clip=1)
    assert weight.is_parameter
    paddle.nn.initializer.Constant(3.0)(weight, weight.block)
    assert weight.tolist() == [3, 3]
    assert not paddle.ones([1]).is_parameter
    paddle.enable_static()
    try:
        program = paddle.static.Program()
        program.global_seed(7)
        assert program.random_seed == 7
    finally:
        paddle.disable_static()


def test_the_module_of_tensors_can_be_called():
    import paddle
    import paddle.tensor as module
    from paddle.tensor import creation

    x = paddle.tensor([1, 2], dtype="float32", requires_grad=True)
    assert (x.tolist(), x.dtype, x.stop_gradient) == ([1, 2], "float32", False)
    copy = module(x)
    copy[0] = 5
    assert (x.tolist(), copy.stop_gradient) == ([1, 2], True)
    assert module.math.add is paddle.add
    assert creation.create_tensor("int64").shape == [0]
    assert x._is_shared_buffer_with(x)
    assert not x._is_shared_buffer_with(copy)


def test_hardware_and_modes_answer():
    import paddle
    from paddle.base import core, framework

    assert not paddle.is_compiled_with_rocm()
    assert not paddle.is_compiled_with_xpu()
    assert core.get_custom_device_count("npu") == core.get_xpu_device_count() == 0
    assert framework.in_dygraph_mode()
    assert framework.in_dynamic_or_pir_mode()
    assert not framework.in_pir_mode()
    assert not paddle.framework.use_pir_api()
    assert str(framework._current_expected_place()) == "Place(cpu)"
    tracer = framework._dygraph_tracer()
    assert tracer._amp_level == core.AmpLevel.O0
    with paddle.amp.auto_cast(level="O2", dtype="bfloat16", custom_black_list=["relu"]):
        assert (tracer._amp_level, tracer._amp_dtype) == (core.AmpLevel.O2, "bfloat16")
        assert value_at("amp.auto_cast.amp_state")() == {"level": "O2", "dtype": "bfloat16"}
        assert tracer._get_amp_op_list() == (set(), {"relu"})
    with paddle.no_grad():
        assert not tracer._has_grad
        assert not core._has_grad()
    assert core.default_cpu_generator().get_state().shape == (2,)
    assert paddle.float32 == core.VarDesc.VarType.FP32
    assert core.size_of_dtype(paddle.int16) == 2
    assert paddle.distributed.fleet.base.topology._HYBRID_PARALLEL_GROUP is None
    assert paddle.long is paddle.int64


def test_scripts_meet_the_version_whose_names_these_are_and_polyreme_keeps_its_own():
    code = (
        "import polyreme; from polyreme.paddle_scripts import as_paddle\n"
        "from importlib.metadata import version\n"
        "with as_paddle():\n"
        "    import paddle, paddle.version\n"
        "    print(paddle.__version__, paddle.version.full_version, paddle.version.rc)\n"
        "    assert paddle.nn.Linear(2, 2)._dtype == 'float32' and hasattr(paddle.Tensor, '_md5sum')\n"
        "    assert hasattr(paddle.nn, 'loss') and paddle.nn.functional.flash_attention._select_sdp\n"
        "assert polyreme.__version__ == polyreme.version.full_version == version('polyreme')\n"
        "assert not hasattr(polyreme.Tensor, '_md5sum') and not hasattr(polyreme.nn, 'loss')\n"
        "assert not hasattr(polyreme.nn.functional.flash_attention, 'flash_attention')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == ("3.3.1 3.3.1 0\n", "")


def test_kernels_compute_what_the_functions_of_their_mathematics_do():
    import paddle
    from paddle import _C_ops, _legacy_C_ops

    x = paddle.to_tensor(np.float32([[1, -2, 3], [4, 5, -6]]))
    a = x.numpy()
    cases = {
        "sum": ([0], None, True), "prod": ([1], False, False), "cumsum": (1, False, True, True),
        "slice": ([1], [1], [2], [1], [1]), "full_like": (2.0, None, None), "split_with_num": (2, 0),
    }  # fmt: skip
    got = {name: getattr(_C_ops, name)(x, *args) for name, args in cases.items()}
    after = np.cumsum(a[:, ::-1], 1)[:, ::-1] - a
    want = {"sum": a.sum(0, keepdims=True), "prod": a.prod(1), "cumsum": after, "slice": a[:, 1],
            "full_like": np.full_like(a, 2), "split_with_num": np.split(a, 2)}  # fmt: skip
    for name, value in want.items():
        np.testing.assert_array_equal(np.asarray(got[name]), value, err_msg=name)
    probs, loss = _C_ops.cross_entropy_with_softmax(x, paddle.to_tensor([[0], [1]]), False, True, True, -100, -1)
    exact = np.exp(a) / np.exp(a).sum(1, keepdims=True)
    np.testing.assert_allclose(loss.numpy()[:, 0], -np.log(exact[[0, 1], [0, 1]]), rtol=8 * 2.0**-23)
    np.testing.assert_allclose(probs.numpy(), exact, rtol=8 * 2.0**-23)

    legacy = _legacy_C_ops
    np.testing.assert_array_equal(legacy.reduce_sum(x, "dim", [1], "keep_dim", False, "reduce_all", False), a.sum(1))
    np.testing.assert_array_equal(legacy.matmul_v2(x, x, "trans_x", False, "trans_y", True), a @ a.T)
    row = paddle.to_tensor(np.float32([10, 20]))
    np.testing.assert_array_equal(legacy.elementwise_add(x, row, "axis", 0), a + np.float32([[10], [20]]))
    assert legacy.arg_max(x, "axis", 1, "dtype", 2).dtype == paddle.int32
    assert legacy.transpose2(x, "axis", [1, 0])[0].shape == [3, 2]
    with pytest.raises(AbsentError, match=r"_C_ops.no_such_kernel: .* no public function here is called after"):
        legacy.no_such_kernel(x)


@pytest.mark.parametrize("name", ["batch_norm", "sync_batch_norm_"])
def test_kernels_of_norms_take_their_arguments_in_paddles_order(name):
    import paddle
    from paddle import _C_ops

    rng = np.random.default_rng(0)
    a, scale, bias = (rng.standard_normal(shape).astype("float32") for shape in ((5, 3), 3, 3))
    x, weight, shift = map(paddle.to_tensor, (a, scale, bias))

    def norm(is_test, use_global_stats, trainable_statistics):
        mean, variance = paddle.full([3], 0.5), paddle.full([3], 2.0)
        out, *stats = getattr(_C_ops, name)(
            x, mean, variance, weight, shift, is_test, 0.9, 1e-5, "NCHW", use_global_stats, trainable_statistics
        )
        assert len(stats) == 5
        return out.numpy(), mean.numpy()

    bound = 32 * 2.0**-23
    by_batch = (a - a.mean(0)) / np.sqrt(a.var(0) + 1e-5) * scale + bias
    by_running = (a - 0.5) / np.sqrt(2 + 1e-5) * scale + bias
    for settings in ((False, False, False), (True, False, True)):
        out, mean = norm(*settings)
        np.testing.assert_allclose(out, by_batch, atol=bound)
        np.testing.assert_allclose(mean, 0.45 + 0.1 * a.mean(0), atol=bound)
    for settings in ((True, False, False), (False, True, True)):
        out, mean = norm(*settings)
        np.testing.assert_allclose(out, by_running, atol=bound)
        np.testing.assert_array_equal(mean, np.full(3, 0.5, "float32"))

    rows = _C_ops.instance_norm(x.reshape([1, 3, 5]), weight, shift, 1e-5).numpy()[0]
    b = a.reshape(3, 5)
    want = (b - b.mean(1, keepdims=True)) / np.sqrt(b.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(rows, want * scale[:, None] + bias[:, None], atol=bound)
    np.testing.assert_array_equal(_C_ops.prelu(x, weight, "NCHW", "channel").numpy(), np.where(a > 0, a, a * scale))
    np.testing.assert_allclose(_C_ops.logsumexp(x, [1], False, True).numpy(), np.log(np.exp(a).sum()), atol=bound)


def test_attributes_that_trainers_read():
    import paddle

    layer = paddle.nn.Linear(2, 3)
    opt = paddle.optimizer.AdamW(0.5, parameters=layer.parameters(), grad_clip=paddle.nn.ClipGradByNorm(1.0))
    assert opt._parameter_list == opt._param_groups == layer.parameters()
    assert (opt._learning_rate, opt.type, opt.regularization, opt._grad_clip.clip_norm) == (0.5, "adamw", None, 1.0)
    opt._learning_rate = paddle.optimizer.lr.StepDecay(0.25, 1)
    assert opt.get_lr() == float(opt._global_learning_rate()) == 0.25
    opt._create_accumulators()
    assert opt._accumulators["moment1"][layer.weight.name].shape == [2, 3]
    opt._grad_clip = None
    assert opt._grad_clip is None
    before = layer.bias.numpy()
    opt._apply_optimize(None, None, [(layer.bias, paddle.ones([3]))])
    assert (layer.bias.numpy() < before).all()
    assert paddle.ParamAttr._to_attr("w").name == "w"
    assert paddle.ParamAttr._to_attr(False) is False
    weight = layer.weight
    assert (weight._numel(), weight._is_initialized(), weight._slice(0, 1).shape) == (6, True, [1, 3])
    assert weight._md5sum() == layer.weight.detach()._md5sum() != layer.bias._md5sum()
    assert layer._obtain_parameters_buffers().keys() == {"weight", "bias"}
    assert layer._cast_to_low_precision
    assert paddle.incubate.jit.is_inference_mode(layer.forward) is False
    assert paddle.device.framework.in_dygraph_mode()
    attention = paddle.nn.MultiHeadAttention(4, 2)
    q, k, _ = attention._prepare_qkv(*[paddle.ones([1, 3, 4])] * 3)
    assert q.shape == k.shape == [1, 2, 3, 2]
    model, loss = paddle.Model(layer), paddle.nn.MSELoss()
    assert (model._optimizer, model._loss) == (None, None)
    model.prepare(opt, loss)
    assert model._optimizer is opt
    assert model._loss is loss
    tracker = paddle.distributed.fleet.meta_parallel.get_rng_state_tracker()
    assert tracker.states_ == tracker.get_states_tracker()


def test_helpers_of_layers_and_what_is_not_there():
    import paddle

    helper = paddle.nn.Linear(2, 2)._helper
    assert helper.get_default_dtype() == "float32"
    assert helper.create_parameter(paddle.ParamAttr(), [2, 3]).shape == [2, 3]
    assert value_at("utils.cpp_extension.cpp_extension.CUDA_HOME") is None
    assert not paddle.onnx.export


def test_helpers():
    import paddle
    from paddle.distributed.fleet.utils.log_util import layer_to_str
    from paddle.distributed.fleet.utils.timer_helper import get_timers, set_timers
    from paddle.nn.layer.transformer import _convert_attention_mask, _convert_param_attr_to_list
    from paddle.utils.download import is_url

    assert paddle.utils.flatten({"b": [1, 2], "a": (3,)}) == [3, 1, 2]
    assert paddle.utils.map_structure(lambda a, b: a + b, [1, {"x": 2}], [10, {"x": 20}]) == [11, {"x": 22}]
    with pytest.raises(ValueError, match="structures of different forms"):
        paddle.utils.map_structure(max, [1], [1, 2])
    assert [a.name for a in _convert_param_attr_to_list(paddle.ParamAttr("w"), 2)] == ["w_0", "w_1"]
    assert _convert_param_attr_to_list(False, 2) == [False, False]
    keep = _convert_attention_mask(paddle.to_tensor([True, False]), "float32")
    assert keep.tolist() == [0.0, -1e9]
    assert layer_to_str("f", 1, a=2) == "f(1, a=2)"
    with pytest.raises(AssertionError, match="there are no stopwatches yet"):
        get_timers()
    set_timers()
    get_timers()("step").start()
    get_timers()("step").stop()
    assert get_timers().info(["step", "other"])["step"] >= 0
    assert is_url("https://x/y")
    assert paddle.signal.frame(paddle.arange(8.0), 4, 2)[:, 1].tolist() == [2, 3, 4, 5]
    np.testing.assert_allclose(paddle.hann_window(4).numpy(), [0, 0.5, 1, 0.5], atol=2.0**-22)
    identity = paddle.nn.init.eye_(paddle.nn.Linear(2, 2).weight)
    assert identity.tolist() == [[1, 0], [0, 1]]
    assert isinstance(paddle.incubate.multiprocessing, ModuleType)


def test_classes_of_the_table_are_there():
    for path in CLASSES:
        home, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(f"polyreme.{home}"), name), type)


def test_kernels_heed_seeds_or_refuse_what_would_change_their_results():
    import paddle
    from paddle import _C_ops, _legacy_C_ops

    first, second = (_C_ops.gaussian([4], 1.0, 2.0, 3, "float32") for _ in range(2))
    np.testing.assert_array_equal(first.numpy(), second.numpy())
    x, q = paddle.ones([2, 3]), paddle.ones([1, 4, 2, 8])
    for call in (
        lambda: _C_ops.dropout(x, None, 0.5, False, "upscale_in_train", 7, True),
        lambda: _legacy_C_ops.dropout(x, "dropout_prob", 0.5, "fix_seed", True, "seed", 7),
        lambda: _C_ops.flash_attn(q, q, q, None, None, 0.0, False, True),
        lambda: _C_ops.flash_attn(q, q, q, None, None, 0.5, False, False, False, "model"),
        lambda: _C_ops.flash_attn_unpadded(q[0], q[0], q[0], paddle.to_tensor([0, 4]), paddle.to_tensor([0, 4]),
                                           None, paddle.ones([4, 4]), 4, 4, 1.0),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match="has no meaning in polyreme"):
            call()


def test_arrays_of_tensors_are_lists():
    from paddle.tensor import array_length, array_read, array_write, create_array

    first, second = polyreme.to_tensor([1.0, 2.0]), polyreme.to_tensor([3.0])
    array = create_array("float32", [first])
    index = polyreme.to_tensor([1])
    assert array_write(second, index, array) is array
    assert array_write(first, 1, array) == [first, first]
    assert array_read(array, index - 1) is first
    assert array_length(array_write(second, 0)) == 1
    for call in (lambda: array_write(first, 3, array), lambda: array_read(array, 2), lambda: array_read(array, -1)):
        with pytest.raises(IndexError, match="of an array of 2"):
            call()
    with pytest.raises(DTypeError, match=r"holds Tensors of it, got paddle\.float32"):
        create_array("int64", [first])
    polyreme.enable_static()
    try:
        with pytest.raises(ProgramError, match=r"a Program has no arrays of Tensors; give static.nn.while_loop"):
            create_array("float32")
    finally:
        polyreme.disable_static()


RATES = {  # at steps 0, 1, 2 and 3
    "noam_decay": ((16, 2), [0, 0.25 / 8**0.5, 0.25 / 2**0.5, 0.25 / 3**0.5]),
    "exponential_decay": ((0.4, 2, 0.25, True), [0.4, 0.4, 0.1, 0.1]),
    "natural_exp_decay": ((0.4, 2, 0.5), [0.4 * np.exp(-0.25 * step) for step in range(4)]),
    "inverse_time_decay": ((0.6, 2, 1.0), [0.6, 0.4, 0.3, 0.24]),
    "polynomial_decay": ((0.5, 2, 0.1, 1.0), [0.5, 0.3, 0.1, 0.1]),
    "cosine_decay": ((0.4, 2, 4), [0.4, 0.4, 0.2 * (1 + 0.5**0.5), 0.2 * (1 + 0.5**0.5)]),
    "piecewise_decay": (([1, 3], [0.3, 0.2, 0.1]), [0.3, 0.2, 0.2, 0.1]),
    "linear_lr_warmup": ((0.5, 2, 0.1, 0.3), [0.1, 0.2, 0.5, 0.5]),
}


@pytest.mark.parametrize("name", RATES)
def test_learning_rates_by_function_are_schedulers(name):
    from paddle.optimizer import lr

    args, rates = RATES[name]
    scheduler = getattr(lr, name)(*args)
    for rate in rates:
        assert scheduler() == pytest.approx(rate, rel=1e-12)
        scheduler.step()


def test_learning_rates_by_function_are_computed_in_programs():
    import paddle

    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program(), paddle.static.Program()):
            rate = paddle.optimizer.lr.noam_decay(16, 2, 3.0)
            assert rate.shape == (1,)
            exe = paddle.static.Executor()
            exe.run(paddle.static.default_startup_program())
            (value,) = exe.run(fetch_list=[rate])
        np.testing.assert_allclose(value, [0.75 / 8**0.5], rtol=8 * 2.0**-23)
    finally:
        paddle.disable_static()


def test_overlapping_pieces_are_added_again():
    import paddle

    x = paddle.to_tensor(np.float32([[1, 2], [3, 4], [5, 6]]), stop_gradient=False)
    signal = paddle.signal.overlap_add(x, 2)
    assert signal.tolist() == [1, 3, 5 + 2, 4, 6]
    (signal * paddle.arange(5.0)).sum().backward()
    assert x.grad.tolist() == [[0, 2], [1, 3], [2, 4]]
    rows = paddle.signal.overlap_add(x.reshape([3, 2, 1]), 1, axis=0)
    assert rows.flatten().tolist() == [1, 2 + 3, 4 + 5, 6]
    for bad, message in (((x, 1, 1), "axis=1; frames lie"), ((x, 0), "hop_length=0; at least 1")):
        with pytest.raises(ConfigError, match=message):
            paddle.signal.overlap_add(*bad)
    with pytest.raises(ShapeError, match="has 1 dims"):
        paddle.signal.overlap_add(x[0], 1)


def test_layers_of_a_model_give_their_results_by_name_and_optimizers_take_groups():
    import paddle
    from paddle.vision.models._utils import IntermediateLayerGetter

    model = paddle.nn.Sequential(
        ("pool", paddle.nn.AvgPool2D(2)), ("fc", paddle.nn.Linear(3, 1)), ("end", paddle.nn.ReLU())
    )
    layers = IntermediateLayerGetter(model, {"fc": "scores", "pool": "means"})
    x = paddle.ones([2, 3, 2, 2])
    results = layers(x)
    assert [(name, value.shape) for name, value in results.items()] == [("means", [2, 3, 1, 1]), ("scores", [2, 1])]
    assert list(layers) == ["pool", "fc"]
    with pytest.raises(ConfigError, match=r"has no layer \['head'\]; it has \['pool', 'fc', 'end'\]"):
        IntermediateLayerGetter(model, {"head": "x"})
    with pytest.raises(
        ConfigError, match=r"return_layers is empty; give the name of a layer of \['pool', 'fc', 'end'\]"
    ):
        IntermediateLayerGetter(model, {})
    optimizer = paddle.optimizer.SGD(0.1, parameters=[model.fc.weight])
    optimizer._add_param_group({"params": model.fc.bias, "learning_rate": 0.5})
    assert optimizer._param_groups == [{"params": [model.fc.weight]}, {"params": [model.fc.bias], "learning_rate": 0.5}]
    assert (optimizer.get_lr(), optimizer._learning_rate) == (0.1, 0.1)  # not the nearest float32


def test_numbers_that_an_optimizer_was_made_with():
    import paddle

    p = paddle.nn.Linear(1, 1).parameters()
    adam, momentum = paddle.optimizer.AdamW(beta1=0.8, parameters=p), paddle.optimizer.Momentum(parameters=p)
    assert (adam._beta1, adam._beta2, adam._epsilon) == (0.8, 0.999, 1e-8)
    assert (momentum._momentum, momentum._use_nesterov, momentum._rescale_grad) == (0.9, False, 1.0)
    with pytest.raises(AttributeError, match="'Momentum' object has no attribute '_beta1'"):
        _ = momentum._beta1
    adam.load_state_dict(adam.state_dict())


def test_a_convolution_with_its_normalization_and_activation():
    from paddle import nn
    from paddle.vision.ops import ConvNormActivation

    whole = ConvNormActivation(3, 4, (3, 5), 2, activation_layer=nn.Hardswish)
    assert [type(layer).__name__ for layer in whole] == ["Conv2D", "BatchNorm2D", "Hardswish"]
    assert list(whole.state_dict()) == ["0.weight", "1.weight", "1.bias", "1._mean", "1._variance"]
    bare = ConvNormActivation(3, 4, dilation=2, norm_layer=None, activation_layer=None)
    x = bare.create_parameter([1, 3, 8, 8])
    assert (whole(x).shape, bare(x).shape, list(bare.state_dict())) == (
        [1, 4, 4, 4], [1, 4, 8, 8], ["0.weight", "0.bias"]
    )  # fmt: skip


def test_loops_and_assignments_of_programs():
    import paddle
    from paddle.static.nn.control_flow import While

    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            i, end, total = paddle.full([1], 0, "int64"), paddle.full([1], 4, "int64"), paddle.zeros([1])
            going = paddle.less_than(i, end)
            with While(going).block():
                paddle.assign(total + paddle.cast(i, "float32"), total)
                paddle.increment(i)
                paddle.assign(paddle.less_than(i, end), going)
            row = paddle.static.setitem(paddle.zeros([3]), (slice(1, None),), 2.0)
            results = paddle.static.Executor().run(fetch_list=[i, total, row])
    finally:
        paddle.disable_static()
    assert [r.tolist() for r in results] == [[4], [6.0], [0.0, 2.0, 2.0]]


def test_modules_of_one_name_are_where_their_names_are():
    import paddle
    from paddle.incubate.nn.functional.masked_multihead_attention import masked_multihead_attention
    from paddle.incubate.optimizer.lookahead import LookAhead
    from paddle.sparse.nn.layer.norm import BatchNorm

    assert paddle.incubate.nn.functional.masked_multihead_attention is masked_multihead_attention
    assert paddle.incubate.optimizer.lookahead.LookAhead is paddle.incubate.LookAhead is LookAhead
    assert paddle.sparse.nn.BatchNorm is BatchNorm


def test_names_that_converted_code_imports():
    import paddle
    from paddle.cuda.nvtx import range_pop, range_push
    from paddle.fluid.dataloader.collate import default_collate_fn
    from paddle.utils.data import DataLoader, default_collate
    from paddle.utils.data.dataset import ConcatDataset

    assert (DataLoader, ConcatDataset) == (paddle.io.DataLoader, paddle.io.ConcatDataset)
    assert default_collate is default_collate_fn
    assert default_collate([{"a": 1}, {"a": 2}])["a"].tolist() == [1, 2]
    made = [paddle.nn.GRU(2, 2), paddle.nn.RNN(paddle.nn.GRUCell(2, 2)), paddle.nn.Linear(2, 2)]
    assert [isinstance(layer, paddle.nn.layer.rnn.RNNBase) for layer in made] == [True, False, False]
    range_push("outer")
    range_push("inner")
    range_pop()
    paddle.device.nvtx.range_pop()
    with pytest.raises(NotReadyError, match="without range_push"):
        range_pop()


def test_projects_ask_whether_parameters_get_values():
    import paddle
    from paddle.nn.initializer.lazy_init import lazy_init_helper

    assert not lazy_init_helper().state
    with paddle.LazyGuard():
        assert lazy_init_helper()._state
    lazy_init_helper().enable()
    try:
        assert lazy_init_helper()._state
    finally:
        lazy_init_helper().disable()
    assert not lazy_init_helper()._state


def test_layers_of_projects_number_their_own_hooks():
    from paddle.nn.layer.layers import HookRemoveHelper

    hooks = {}
    first, second = HookRemoveHelper(hooks), HookRemoveHelper(hooks)
    hooks[first._hook_id], hooks[second._hook_id] = "first", "second"
    first.remove()
    assert list(hooks.values()) == ["second"]


def test_a_captured_function_is_rolled_back():
    import paddle

    class Doubles(paddle.nn.Layer):
        @paddle.jit.to_static
        def forward(self, x):
            return x + x if isinstance(x, int) else x * 2

    layer = Doubles()
    assert layer.forward.rollback()(3) == 6
    assert not hasattr(layer.forward, "rollback")
    assert layer(3) == 6

    def plus_one(x):
        return x + 1

    assert paddle.jit.to_static(plus_one).rollback() is plus_one
    linear = paddle.jit.to_static(paddle.nn.Linear(1, 1))
    linear.forward.rollback()
    assert not hasattr(linear.forward, "rollback")


def test_names_that_examples_of_paddle_use():
    import paddle
    from paddle.amp import debugging

    with pytest.raises(AbsentError, match=r"paddle.amp.debugging.compare_accuracy: .*FLAGS_check_nan_inf"):
        debugging.compare_accuracy("a", "b", "c")
    with pytest.raises(AbsentError, match=r"paddle.incubate.autotune.set_config: .*XLA chooses kernels"):
        paddle.incubate.autotune.set_config({})
    assert paddle.get_default_device() == "cpu"
    assert paddle.get_device_module("cpu") is paddle.device
    assert paddle.version.cinn() == "False"
    assert paddle.distributed.ParallelMode.PIPELINE_PARALLEL == 2
    assert paddle.reader.decorator.firstn is paddle.reader.firstn
    recompute = paddle.distributed.fleet.recompute
    assert paddle.incubate.distributed.fleet.recompute_sequential is recompute.recompute_sequential
    arrays = paddle.base.executor.as_numpy([paddle.ones([2]), None])
    np.testing.assert_array_equal(arrays[0], [1, 1])
    assert arrays[1] is None


def test_detectors_call_nms_and_anchors_by_their_kernels():
    """Boxes of 2 images and classes, the two worse ones of class 0 overlapping the best; of one row and class each."""
    import paddle
    from paddle import _C_ops, _legacy_C_ops

    boxes = np.array([[[0, 0, 4, 4], [0, 0, 4, 3], [8, 8, 9, 9]]] * 2, "float32")
    scores = np.array([[[0.9, 0.8, 0.1], [0.1, 0.2, 0.7]]] * 2, "float32")
    names = ("background_label", "score_threshold", "nms_top_k", "nms_threshold", "keep_top_k", "nms_eta", "normalized")
    attributes = [v for pair in zip(names, (-1, 0.3, 10, 0.5, 10, 1.0, True), strict=True) for v in pair]
    tensors = paddle.to_tensor(boxes), paddle.to_tensor(scores)
    rows, index, counts = _legacy_C_ops.multiclass_nms3(*tensors, None, *attributes)
    np.testing.assert_array_equal(rows.numpy()[:2, 0], [0, 1])
    np.testing.assert_array_equal(index.numpy()[:, 0], [0, 2, 3, 5])
    np.testing.assert_array_equal(counts.numpy(), [2, 2])
    # a box for each class, and the rows of two images: places are those among rows x classes
    of_class = paddle.to_tensor(np.stack([boxes[0], boxes[0] + 1], 1)), paddle.to_tensor(scores[0].T)
    args = (paddle.to_tensor(np.array([2, 1], "int32")), 0.3, 10, 10, 0.5, True, 1.0, -1)
    rows, index, counts = _C_ops.multiclass_nms3(*of_class, *args)
    np.testing.assert_array_equal(index.numpy()[:, 0], [0, 5])
    np.testing.assert_array_equal(counts.numpy(), [1, 1])
    anchors, _ = _legacy_C_ops.anchor_generator(
        paddle.zeros([1, 3, 2, 2]), "anchor_sizes", [16.0, 32.0], "aspect_ratios", [1.0], "variances",
        [0.1, 0.1, 0.2, 0.2], "stride", [8.0, 8.0], "offset", 0.5,
    )  # fmt: skip
    assert anchors.shape == [2, 2, 2, 4]


def test_what_projects_ask_of_fleet_and_linear():
    import paddle
    from paddle.distributed import fleet

    assert not hasattr(fleet.fleet, "_hcg")
    paddle.disable_static()
    x = paddle.ones([2, 3, 4])
    column, batches = paddle.nn.functional.linear(x, paddle.ones([4]), paddle.ones([1])), paddle.ones([2, 4, 5])
    np.testing.assert_array_equal(column.numpy(), np.full([2, 3], 5.0))
    assert paddle.Tensor(np.ones(2, "float32"), zero_copy=True).tolist() == [1.0, 1.0]
    asked = ("is_cuda_pinned_place", "is_xpu_place", "is_custom_place", "custom_device_type", "gpu_device_id")
    assert [getattr(x.place, name)() for name in asked] == [False, False, False, "", 0]
    assert paddle.nn.functional.linear(x, batches, paddle.ones([5])).shape == [2, 3, 5]


def test_dtypes_of_tensors_print_as_scripts_cut_them(tmp_path):
    import paddle

    x = paddle.ones([2])
    assert [str(x.dtype), repr(x.dtype), f"{x.dtype}"] == ["paddle.float32"] * 3
    assert str(x.dtype).split(".")[1] == x.dtype.name == "float32"
    assert isinstance(x.dtype, paddle.dtype)
    assert isinstance(paddle.float32, paddle.dtype)
    assert x.dtype == paddle.float32 == x.dtype
    assert {paddle.float32: 1}[x.dtype] == 1
    assert x.dtype in (paddle.int64, paddle.float32)
    assert x.dtype != paddle.int64
    assert pickle.loads(pickle.dumps(x.dtype)) is x.dtype
    assert np.zeros(1, x.dtype).dtype == np.float32
    made = [paddle.zeros([2], x.dtype), x.astype(x.dtype), paddle.cast(paddle.ones([2], "int64"), x.dtype)]
    assert [str(t.dtype) for t in made] == ["paddle.float32"] * 3
    program = paddle.static.Program()
    paddle.enable_static()
    try:
        with paddle.static.program_guard(program):
            y = paddle.static.data("x", [2], "int32")
            paddle.cast(y * 2, x.dtype)
        paddle.save(program, str(tmp_path / "m.pdmodel"))
    finally:
        paddle.disable_static()


def test_weights_of_a_model_with_another_head_are_loaded_but_for_the_head():
    import paddle

    model, other = (paddle.nn.Sequential(paddle.nn.Linear(2, 3), paddle.nn.Linear(3, n)) for n in (4, 5))
    head = model[1].weight.numpy()
    with pytest.warns(
        UserWarning, match=r"left out, and stay as they are here: 1\.weight has shape \[3, 5\], not \[3, 4\]"
    ):
        missing, unexpected = model.set_state_dict(other.state_dict())
    assert missing == unexpected == ["1.weight", "1.bias"]
    np.testing.assert_array_equal(model[0].weight.numpy(), other[0].weight.numpy())
    np.testing.assert_array_equal(model[1].weight.numpy(), head)
