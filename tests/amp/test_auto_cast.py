import numpy as np
import pytest

from polyreme import amp
from polyreme.core import amp_policy
from polyreme.eager.mode import no_grad
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.nn.layer import Layer
from polyreme.nn.layers.batch_norm import BatchNorm1D
from polyreme.nn.layers.linear import Linear
from polyreme.nn.layers.norm import LayerNorm
from polyreme.ops.arithmetic import add, matmul
from polyreme.ops.math import exp
from polyreme.optimizer import SGD, AdamW


def tensor(dtype="float32"):
    return to_tensor(np.ones((2, 2)), dtype=dtype)


# op, dtypes of the inputs -> dtype of the result at each level: "low" (matmul), "fp32" (exp), "widest" (add)
@pytest.mark.parametrize(
    ("level", "promote", "want"),
    [
        ("O0", True, ["float32", "float32", "float32", "bfloat16", "float32"]),
        ("OD", True, ["bfloat16", "float32", "float32", "float32", "float32"]),
        ("O1", True, ["bfloat16", "float32", "float32", "bfloat16", "float32"]),
        ("O2", True, ["bfloat16", "float32", "float32", "bfloat16", "float32"]),
        ("O2", False, ["bfloat16", "float32", "bfloat16", "bfloat16", "bfloat16"]),
    ],
)
def test_each_level_casts_its_ops(level, promote, want):
    wide, low = tensor(), tensor("bfloat16")
    with amp.auto_cast(level=level, dtype="bfloat16", use_promote=promote):
        results = [matmul(wide, wide), exp(wide), add(wide, wide), add(low, low), add(wide, low)]
    assert [r.dtype.name for r in results] == want


def test_custom_lists_move_ops():
    x = tensor()
    with amp.auto_cast(custom_white_list={"exp"}, custom_black_list=["matmul"], dtype="bfloat16"):
        assert exp(x).dtype == "bfloat16"
        assert matmul(x, x).dtype == "float32"


def test_custom_lists_take_operators_and_what_ops_compute():
    x, labels = tensor(), to_tensor(np.zeros(2, "int64"))
    lists = ["elementwise_add", "c_softmax_with_cross_entropy", "lookup_table_v2", "flash_attn", "batch_norm"]
    with amp.auto_cast(custom_white_list=lists, custom_black_list=["matmul_v2", "reduce_sum"], dtype="bfloat16"):
        assert add(x, x).dtype == F.cross_entropy(x, labels).dtype == "bfloat16"
        assert F.embedding(labels, x).dtype == "bfloat16"
        assert matmul(x, x).dtype == "float32"


def test_operators_that_are_several_ops_here_are_logged(caplog):
    with amp.auto_cast(custom_black_list=["fused_attention", "flatten_contiguous_range"], dtype="bfloat16"):
        assert matmul(tensor(), tensor()).dtype == "bfloat16"
    assert "custom_black_list names 'fused_attention', which is several ops here" in caplog.text


def test_float64_and_integers_are_left_alone():
    with amp.auto_cast(dtype="bfloat16"):
        assert matmul(tensor("float64"), tensor("float64")).dtype == "float64"
        assert add(tensor("int64"), tensor("int64")).dtype == "int64"


def test_nesting_the_decorator_and_leaving_by_an_exception():
    assert not amp.is_autocast_enabled()

    @amp.auto_cast(dtype="bfloat16")
    def product(x):
        assert amp.is_autocast_enabled()
        assert amp.get_autocast_dtype() == "bfloat16"
        with amp.amp_guard(enable=False):
            assert not amp.is_autocast_enabled()
        return matmul(x, x)

    assert product(tensor()).dtype == "bfloat16"
    with pytest.raises(KeyError), amp.auto_cast():
        raise KeyError
    assert amp_policy.active.policy is None
    assert amp.get_autocast_dtype() == "float16"


def test_gradients_come_in_the_parameters_dtype():
    layer = Linear(2, 2)
    with amp.auto_cast(dtype="bfloat16"):
        out = layer(tensor())
    assert out.dtype == "bfloat16"
    out.astype("float32").sum().backward()
    assert layer.weight.grad.dtype == "float32"
    np.testing.assert_array_equal(layer.weight.grad.numpy(), np.full((2, 2), 2.0))


def test_captured_functions_are_captured_again_for_another_policy():
    f = to_static(lambda x: matmul(x, x))
    assert f(tensor()).dtype == "float32"
    with amp.auto_cast(dtype="bfloat16"):
        assert f(tensor()).dtype == "bfloat16"
    assert len(f.retraces) == 2
    assert f.retraces[1].startswith("autocast")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": "O3"}, "level='O3'"),
        ({"dtype": "float32"}, "float16 or bfloat16, got float32"),
        ({"custom_white_list": ["matmull"]}, "'matmull', which is not one; did you mean 'matmul'"),
        ({"custom_white_list": "matmul"}, "got the string 'matmul'"),
        ({"custom_white_list": ["add"], "custom_black_list": ["add"]}, "keep each in one"),
    ],
)
def test_refuses_what_it_cannot_do(given, message):
    with pytest.raises(ConfigError, match=message), amp.auto_cast(**given):
        pass


def test_support_on_the_cpu():
    assert amp.is_bfloat16_supported()
    assert amp.is_float16_supported()


class Net(Layer):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.ln, self.b = Linear(4, 4), BatchNorm1D(4), LayerNorm(4), Linear(4, 2)


@pytest.mark.parametrize(("dtype", "ln"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_decorate_casts_all_but_norms(dtype, ln):
    net = Net()
    assert amp.decorate(net, level="O2", dtype=dtype) is net
    found = {n: p.dtype.name for n, p in net.named_parameters()}
    assert found["a.weight"] == found["b.bias"] == dtype
    assert found["bn.weight"] == "float32"
    assert found["ln.weight"] == ln


def test_decorate_at_o1_changes_nothing():
    net, optimizer = Net(), None
    optimizer = SGD(parameters=net.parameters())
    assert amp.decorate(net, optimizer, level="O1") == (net, optimizer)
    assert {p.dtype.name for p in net.parameters()} == {"float32"}


def test_excluded_layers_by_instance_and_by_class():
    net = Net()
    amp.decorate([net], level="O2", dtype="bfloat16", excluded_layers=[net.a, LayerNorm])
    assert net.a.weight.dtype == net.ln.weight.dtype == "float32"
    assert net.b.weight.dtype == "bfloat16"


def test_layers_that_refuse_the_cast_keep_their_dtype():
    class Gate(Linear):
        _cast_to_low_precision = False

    gate = Gate(2, 2)
    gate.inner = Linear(2, 2)
    amp.decorate(gate, level="O2", dtype="bfloat16")
    assert (gate.weight.dtype, gate.inner.weight.dtype) == ("float32", "bfloat16")


def test_masters_start_from_the_values_before_the_cast():
    net = Linear(3, 3)
    before = net.weight.numpy()
    optimizer = AdamW(parameters=net.parameters())
    amp.decorate(net, optimizer, level="O2", dtype="bfloat16")
    optimizer.create_state()
    master = optimizer.state_dict()[f"{net.weight.name}_master_0"]
    np.testing.assert_array_equal(master.numpy(), before)
    np.testing.assert_array_equal(net.weight.numpy(), before.astype(net.weight.dtype))


def test_without_master_weights():
    net = Linear(3, 3)
    optimizer = SGD(parameters=net.parameters())
    amp.decorate(net, optimizer, level="O2", dtype="bfloat16", master_weight=False)
    optimizer.create_state()
    assert optimizer.state_dict() == {}


def test_master_grad_adds_up_in_float32():
    # 256 + 1 is 256 in bfloat16, whose numbers there are 2 apart
    net = Linear(1, 1, bias_attr=False)
    amp.decorate(net, level="O2", dtype="bfloat16", master_grad=True)
    for value in (256.0, 1.0):
        net(to_tensor([[value]], dtype="bfloat16")).sum().backward()
    assert net.weight.grad.dtype == "float32"
    assert net.weight.grad.item() == 257.0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"level": "OD"}, "level='OD'"),
        ({"level": "O2", "save_dtype": "float32"}, "save_dtype='float32' is not supported"),
        ({"models": 3}, "models is a Layer or a list of them, got int"),
        ({"optimizers": "adam"}, "optimizers is a Optimizer or a list of them, got str"),
        ({"excluded_layers": ["Linear"]}, "excluded_layers holds layers"),
    ],
)
def test_decorate_refusals(given, message):
    with pytest.raises(ConfigError, match=message):
        amp.decorate(**{"models": Linear(2, 2), **given})


def test_o2_training_tracks_float32():
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 4)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")

    def losses(low):
        net = Linear(4, 1)
        with no_grad():
            net.weight.set_value(np.full((4, 1), 0.5))
        optimizer = AdamW(0.05, parameters=net.parameters())
        if low:
            amp.decorate(net, optimizer, level="O2", dtype="bfloat16")

        @to_static
        def step(x, y):
            with amp.auto_cast(enable=low, level="O2", dtype="bfloat16"):
                loss = ((net(x) - y).astype("float32") ** 2).mean()
            loss.backward()
            optimizer.step()
            optimizer.clear_grad()
            return loss

        return [step(to_tensor(x), to_tensor(y)).item() for _ in range(20)]

    full, low = losses(False), losses(True)
    assert full[-1] < 0.8 * full[0]
    # one bfloat16 rounding (2^-9 relative) of activations of size up to 4, squared and averaged: 2 * 4 * 4 * 2^-9
    np.testing.assert_allclose(low, full, rtol=0, atol=2 * 4 * 4 * 2**-9)


@pytest.mark.parametrize("captured", [False, True])
def test_weights_that_are_loaded_after_decorate_are_those_that_are_trained(captured):
    model = Linear(1, 2)
    optimizer = SGD(0.5, parameters=model.parameters())
    model.bias.set_value(np.array([1 + 2**-12, 0.0], "float32"))  # below what bfloat16 has
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16")
    model.set_state_dict({"weight": to_tensor(np.array([[3.0, 4.0]], "float32")).astype("bfloat16")})

    def step():
        model(to_tensor(np.zeros((1, 1), "float32")).astype("bfloat16")).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    (to_static(step) if captured else step)()
    assert model.weight.tolist() == [[3.0, 4.0]]
    masters = {name: t.tolist() for name, t in optimizer.state_dict().items() if name.endswith("master_0")}
    assert masters[f"{model.bias.name}_master_0"] == [0.5 + 2**-12, -0.5]
    assert masters[f"{model.weight.name}_master_0"] == [[3.0, 4.0]]


@pytest.mark.parametrize("captured", [False, True])
def test_a_checkpoint_that_is_loaded_after_steps_is_trained_from(captured):
    model = Linear(1, 2)
    optimizer = SGD(0.5, parameters=model.parameters())
    amp.decorate(model, optimizer, level="O2", dtype="bfloat16")

    def step():
        model(to_tensor(np.zeros((1, 1), "float32")).astype("bfloat16")).sum().backward()
        optimizer.step()
        optimizer.clear_grad()

    run = to_static(step) if captured else step
    run()
    model.set_state_dict({"weight": to_tensor([[3.0, 4.0]]), "bias": to_tensor([8.0, 9.0])})
    run()
    assert model.weight.tolist() == [[3.0, 4.0]]
    assert model.bias.tolist() == [7.5, 8.5]
    masters = {name: t for name, t in optimizer.state_dict().items() if name.endswith("master_0")}
    masters[f"{model.bias.name}_master_0"].set_value(np.array([7.5 + 2**-10, 8.5], "float32"))
    saved = model.bias.numpy()
    model.bias.set_value(saved + 1)
    model.bias.set_value(saved)  # the same value, as after an evaluation of other weights: the finer digits stay
    run()
    assert masters[f"{model.bias.name}_master_0"].tolist() == [7.0 + 2**-10, 8.0]
