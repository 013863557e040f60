"""Errors as help: codes and their page, the layer and line of a shape error, what is said when memory runs out."""

import builtins
import contextlib
import copy
import gc
import inspect
import pickle
import re
import weakref

import cloudpickle
import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import errors, nn, static
from polyreme.cli.main import main
from polyreme.core.devices import device_memory
from polyreme.errors import (
    ArgumentTypeError,
    ConfigError,
    DataError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    NumericsError,
    ShapeError,
    error_classes,
)
from polyreme.jit.called import Called
from tools import write_errors

CLASSES = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]


class FFN(nn.Layer):
    def __init__(self, width=12):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(width, 8)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))  # the user's line


class Block(nn.Layer):
    def __init__(self, width):
        super().__init__()
        self.ffn = FFN(width)

    def forward(self, x):
        return x + self.ffn(x)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.blocks = nn.LayerList([Block(16), Block(16), Block(16), Block(12)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


# codes


def test_every_class_has_a_code_cause_and_cure_of_its_own():
    assert set(error_classes()) == set(CLASSES)
    for name in ("code", "cause", "cure"):
        assert len({vars(kind)[name] for kind in CLASSES}) == len(CLASSES)
    for kind in CLASSES:
        assert re.fullmatch(r"PR\d{3}", kind.code)
        assert any(getattr(builtins, base.__name__, None) is base for base in kind.__mro__[1:-3])


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_the_last_note_names_the_code_and_explain_takes_it(kind, capsys):
    error = kind("words", 2, 1) if kind is errors.NoSpaceError else kind("words")
    error.add_note("first")
    for one in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert one.__notes__ == ["first", f"more: polyreme explain {kind.code}"]
    assert str(error) == "words"
    for name in (kind.code.lower(), kind.__name__):
        assert main(["explain", name]) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert out.startswith(f"{kind.code} {kind.__name__}: ")
        assert kind.cause in out
        assert kind.cure in out


def test_explain_lists_all_and_answers_a_wrong_code(capsys):
    assert main(["explain"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [k.code for k in error_classes()]
    assert main(["explain", "ShapError"]) == 2
    assert "did you mean 'ShapeError'" in capsys.readouterr().err


def test_the_page_is_written_from_the_classes_and_its_examples_give_what_it_shows(capsys):
    assert write_errors.PAGE.read_text() == write_errors.page(), "python -m tools.write_errors"
    examples = re.findall(r"```python\n((?:(?!```).)*)```\n\n((?:    [^\n]*\n)+)", write_errors.page(), re.DOTALL)
    assert len(examples) == 2
    for code, shown in examples:
        exec(compile(code, "page.py", "exec"), {"__name__": "page"})
        said = [line for line in capsys.readouterr().out.splitlines() if line]
        expected = [line.strip() for line in shown.splitlines()]
        # a file that is not on disk has no source to show
        assert said == [line.partition(": return self.down")[0] for line in expected]


# where


def _captured(net):
    return paddle.jit.to_static(lambda x: net(x).sum())(paddle.ones([2, 8]))


def _recorded(net):
    paddle.enable_static()
    try:
        with static.program_guard(static.Program(), static.Program()):
            net()(static.data("x", [None, 8]))
    finally:
        paddle.disable_static()


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "run",
    [
        lambda: Net()(paddle.ones([2, 8])),
        lambda: _captured(Net()),
        lambda: paddle.jit.to_static(Net())(paddle.ones([2, 8])),
        lambda: _recorded(Net),
    ],
    ids=["eager", "captured", "captured layer", "program"],
)
def test_a_shape_error_names_layer_sizes_and_line(run):
    with pytest.raises(ShapeError, match=r"linear: x \[-?\d, 16\] and weight \[12, 8\] do not fit") as caught:
        run()
    where, last = caught.value.__notes__
    assert where.startswith("in layer blocks.3.ffn.down (Linear) of Net, ")
    assert where.endswith("return self.down(nn.functional.gelu(self.up(x)))  # the user's line")
    assert f"{__file__}:{inspect.getsourcelines(FFN.forward)[1] + 1}" in where
    assert last == "more: polyreme explain PR101"


def test_a_program_that_runs_says_where_it_was_recorded():
    paddle.enable_static()
    try:
        main, startup = static.Program(), static.Program()
        with static.program_guard(main, startup):
            x = static.data("x", [None, None])
            out = FFN(16)(x)
        exe = static.Executor()
        exe.run(startup)
        with pytest.raises(ShapeError) as caught:
            exe.run(main, feed={"x": np.ones([2, 7], np.float32)}, fetch_list=[out])
    finally:
        paddle.disable_static()
    operation, recorded, last = caught.value.__notes__[-3:]
    assert operation.startswith("in the Program's operation: ")
    assert recorded.startswith("recorded in layer up (Linear) of FFN, ")
    assert "return self.down(nn.functional.gelu(self.up(x)))" in recorded
    assert last == "more: polyreme explain PR101"


def test_outside_of_layers_and_in_layers_that_no_other_holds():
    with pytest.raises(ShapeError) as caught:
        paddle.ones([2, 3]) @ paddle.ones([4, 5])
    assert caught.value.__notes__ == ["more: polyreme explain PR101"]
    loose = nn.Linear(3, 4)

    class Caller(nn.Layer):
        def forward(self, x, layer):
            return layer(x)

    with pytest.raises(ShapeError) as caught:
        Caller()(paddle.ones([2, 8]), loose)
    assert caught.value.__notes__[0].startswith("in layer Linear (Linear) of Caller, ")
    with pytest.raises(ShapeError) as caught:
        loose(paddle.ones([2, 8]))
    assert caught.value.__notes__[0].startswith("in layer Linear, ")


class Unhashable(FFN):
    __hash__ = None


class Compared(FFN):
    def __eq__(self, other):
        raise RuntimeError("compared")

    __hash__ = nn.Layer.__hash__


class Listing(FFN):
    def named_sublayers(self, *args, **kwargs):
        raise RuntimeError("listed")


@pytest.mark.parametrize("kind", [Unhashable, Compared, Listing])
def test_no_layer_of_a_users_own_hides_the_error(kind):
    for _ in range(2):
        with pytest.raises(ShapeError) as caught:
            kind()(paddle.ones([2, 8]))
        assert caught.value.__notes__[0].startswith(f"in layer down (Linear) of {kind.__name__}, ")


def test_a_layer_is_named_as_it_is_held_now():
    model = nn.Sequential(("old", FFN()))
    for name in ("old", "new"):
        model._sub_layers = {name: model[0]}
        with pytest.raises(ShapeError) as caught:
            model(paddle.ones([2, 8]))
        assert caught.value.__notes__[0].startswith(f"in layer {name}.down (Linear) of Sequential, ")


# memory


class _Failing:
    """Raises what XLA says of an allocation that failed, where a kernel would run."""

    def __init__(self, text):
        self.text = text

    def __call__(self, *_, **__):
        raise jax.errors.JaxRuntimeError(self.text)


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1073741824 bytes.", 1 << 30),
        ("RESOURCE_EXHAUSTED: Out of memory allocating 4096 bytes.", 4096),
        ("INTERNAL: Error dispatching computation: Out of memory allocating 2048 bytes.", 2048),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.50GiB.", 3 << 29),
        ("RESOURCE_EXHAUSTED: nothing more is known", 0),
        ("RESOURCE_EXHAUSTED: Out of memory allocating ... bytes", 0),
    ],
)
def test_memory_that_does_not_suffice_is_told_by_part(words, asked):
    net = nn.Linear(64, 256)
    optimizer = paddle.optimizer.AdamW(parameters=net.parameters())
    net(paddle.ones([2, 64])).sum().backward()
    optimizer.step()
    pending = net(paddle.ones([512, 64])).exp()  # waits for its backward
    # a weak proxy whose object is gone, and objects that are being made, are among the process's too
    others = [weakref.proxy(FFN()), object.__new__(type(net.weight)), object.__new__(paddle.optimizer.AdamW)]
    with pytest.raises(DeviceMemoryError, match="out of memory in op tanh") as caught:
        device_memory.raise_explained(jax.errors.JaxRuntimeError(words), "op tanh")
    error, size = caught.value, 4 * (64 * 256 + 256)
    assert isinstance(error, MemoryError)
    assert error.asked == asked
    assert error.parts["parameters"] >= size
    assert error.parts["gradients"] >= size
    assert error.parts["optimizer state"] >= 2 * size
    assert error.parts["activations"] >= 4 * 512 * 64
    changes = device_memory.changes(asked, error.parts)
    assert 1 <= len(changes) <= 3
    assert all(0 < change.nbytes <= asked + sum(error.parts.values()) for change in changes)
    for number, change in enumerate(changes, 1):
        assert f"{number}) {change.what}: about " in str(error)
    assert pending.shape == [512, 256]
    assert len(others) == 3
    assert error.__notes__[-1] == "more: polyreme explain PR105"


def test_other_errors_of_xla_stay_as_they_are():
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: other"):
        device_memory.raise_explained(jax.errors.JaxRuntimeError("INTERNAL: other"), "op tanh")


def refused_assert(net):
    @paddle.jit.to_static
    def step(x):
        assert x.sum() > 3, "small"
        return x

    step(net.weight.detach() * 0)


def not_finite(net):
    with paddle.set_grad_enabled(False):
        paddle.set_flags({"FLAGS_check_nan_inf": True})
        try:
            paddle.log(net.weight * 0 - 1)
        finally:
            paddle.set_flags({"FLAGS_check_nan_inf": False})


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda net: net(paddle.ones([2, 3])), ShapeError),
        (refused_assert, AssertionError),
        (not_finite, NumericsError),
    ],
)
def test_a_caught_error_leaves_no_array_to_the_collector(call, kind):
    def weight_of_call():
        net = nn.Linear(4, 2)
        with contextlib.suppress(kind):
            call(net)
            raise RuntimeError("nothing was refused")
        return weakref.ref(net.weight)

    gc.disable()
    try:
        assert weight_of_call()() is None
    finally:
        gc.enable()


def test_eager_ops_captured_steps_and_fit_say_what_ran_out(monkeypatch):
    """More than any machine has: what is asked for is never touched."""
    huge = paddle.ones([1 << 24])
    with pytest.raises(DeviceMemoryError) as caught:
        (huge.reshape([-1, 1]) @ huge.reshape([1, -1])).numpy()
    assert caught.value.asked == 4 << 48

    def widened(x):
        return (x.T @ x).sort(axis=0)

    with pytest.raises(DeviceMemoryError, match="out of memory in program widened"):
        jax.block_until_ready(Called(widened)(jax.numpy.ones([2, 1 << 20])))

    net = nn.Linear(1, 1 << 20)
    optimizer = paddle.optimizer.SGD(parameters=net.parameters())

    def step(x):
        out = net(x)
        loss = (out.transpose([1, 0]) @ out).tanh().sum()
        loss.backward()
        optimizer.step()
        optimizer.clear_grad()
        return loss

    with pytest.raises(DeviceMemoryError, match="step") as caught:
        paddle.jit.to_static(step)(paddle.ones([2, 1])).numpy()
    assert caught.value.asked >= 4 << 40
    assert caught.value.parts["parameters"] >= 4 * 2 << 20
    net = nn.Linear(1, 1 << 20)  # the step that failed had the other's parameters donated
    model = paddle.Model(net)
    optimizer = paddle.optimizer.SGD(parameters=net.parameters())
    model.prepare(optimizer, lambda out, _: (out.transpose([1, 0]) @ out).tanh().sum())
    with pytest.raises(DeviceMemoryError, match="The cheapest changes: 1\\)"):
        model.train_batch([paddle.ones([2, 1])], [paddle.ones([2, 1])])


# names


@pytest.mark.parametrize(
    ("module", "wrong", "right"),
    [
        (nn.functional, "relo", "relu"),
        (paddle, "optimiser", "optimizer"),
        (paddle.optimizer, "Adamw", "AdamW"),
        (nn, "Linar", "Linear"),
        (paddle.optimizer, "AdmW", "AdamW"),
        (paddle.optimizer.lr, "CosineAnealingDecay", "CosineAnnealingDecay"),
        (paddle.vision, "imge_load", "image_load"),
        (paddle.jit, "to_statik", "to_static"),
        (paddle.distributed, "all_reduse", "all_reduce"),
        (paddle.io, "DataLoadr", "DataLoader"),
        (paddle, "matmull", "matmul"),
    ],
)
def test_an_attribute_that_is_not_there_is_answered_with_the_nearest(module, wrong, right):
    with pytest.raises(AttributeError, match=f"{wrong}'; did you mean '{right}'"):
        getattr(module, wrong)


def test_a_name_of_another_library_or_module_is_answered_with_what_to_write():
    with pytest.raises(AttributeError, match=r"'compile'; write paddle\.jit\.to_static$"):
        _ = paddle.compile
    with pytest.raises(AttributeError, match=r"'lr_scheduler'; write paddle\.optimizer\.lr$"):
        _ = paddle.optimizer.lr_scheduler
    with pytest.raises(AttributeError, match=r"'Linear'; write paddle\.nn\.Linear$"):
        _ = paddle.Linear


def test_a_name_like_none_and_one_of_python_are_not_answered():
    for name in ("zzzzqqq", "__wrapped__"):
        with pytest.raises(AttributeError, match=rf"has no attribute '{name}'$"):
            getattr(nn, name)


@pytest.mark.parametrize("by_value", [pickle, cloudpickle], ids=["pickle", "cloudpickle"])
def test_a_module_that_suggests_names_is_pickled_by_its_name(by_value):
    for module in (nn, nn.functional):
        assert pickle.loads(by_value.dumps(module)) is module


class _NoBase(paddle.nn.Layer):
    def __init__(self):
        self.factor = 3

    def forward(self, x):
        return x * self.factor


_LINEAR = paddle.nn.Linear(3, 2)


def _fit_without_labels():
    model = paddle.Model(paddle.nn.Linear(3, 2))
    model.prepare(paddle.optimizer.SGD(parameters=model.parameters()), paddle.nn.CrossEntropyLoss())
    model.fit(np.ones([4, 3], np.float32), batch_size=2, verbose=0)


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: paddle.ones([2, 3]) + paddle.ones([2, 4]), ShapeError, r"dim -1 is 3 and 4; make them equal or 1"),
        (
            lambda: paddle.where(paddle.ones([2, 3]) > 0, paddle.ones([2, 1]), paddle.ones([4])),
            ShapeError,
            r"dim -1 is 3 and 1 and 4",
        ),
        (
            lambda: paddle.ones([2, 3]).__setitem__(0, paddle.ones([4])),
            ShapeError,
            r"selects \[3\] of .* value of shape \[4\]",
        ),
        (
            lambda: paddle.ones([2, 3]) @ paddle.ones([2, 3]),
            ShapeError,
            r"matmul: x \[2, 3\] and y \[2, 3\] do not fit",
        ),
        (lambda: _NoBase()(paddle.ones([1])), RuntimeError, r"call super\(\).__init__\(\) first of all in _NoBase"),
        (
            lambda: paddle.nn.functional.cross_entropy(paddle.ones([2, 3]), paddle.ones([2, 3], "int64")),
            ShapeError,
            "for one-hot labels and probabilities say soft_label=True",
        ),
        (
            lambda: paddle.ones([1], dtype="flaot32"),
            DTypeError,
            "'flaot32' is not a dtype here; did you mean 'float32'",
        ),
        (
            lambda: paddle.set_device("cpu:99"),
            DeviceError,
            "asked for cpu:99, but there are .*; CPU_NUM=100 gives so many",
        ),
        (
            lambda: paddle.nn.Linear(2, 2).set_state_dict("a.pdparams"),
            ConfigError,
            r"got str; paddle.load\(path\) reads",
        ),
        (
            lambda: paddle.optimizer.SGD(0.1, parameters=paddle.nn.Linear(2, 2)),
            ConfigError,
            r"got one Linear; write parameters=model.parameters\(\)",
        ),
        (
            lambda: paddle.Model(paddle.nn.Linear(2, 2)).prepare(loss=paddle.nn.MSELoss),
            ConfigError,
            r"loss is the class MSELoss; write MSELoss\(...\)",
        ),
        (
            lambda: paddle.metric.Accuracy().update(paddle.ones([2, 2]), paddle.ones([2])),
            ConfigError,
            r"does not take Tensor; leave it out. compute\(pred, label\) gives what update takes",
        ),
        (lambda: paddle.load(__file__, map_location="cpu"), ConfigError, "map_location.*Leave it out"),
        (
            lambda: _LINEAR.set_state_dict({"weight": np.ones([2, 3]), "bias": np.ones(2)}),
            ShapeError,
            r"weight: expected \[3, 2\], got \[2, 3\]; PyTorch stores .* transpose those",
        ),
        (
            lambda: paddle.nn.Sequential(_LINEAR, paddle.nn.functional.relu),
            TypeError,
            "Sequential: sublayer '1' needs a Layer, got the function relu; give the Layer",
        ),
        (lambda: paddle.nn.Sequential(paddle.nn.ReLU), TypeError, r"got the class ReLU; write ReLU\(\)"),
        (lambda: setattr(_LINEAR, "weight", paddle.ones([3, 2])), TypeError, r"\.weight\.set_value\(\.\.\.\) gives it"),
        (
            lambda: paddle.nn.MultiHeadAttention(8, 2)(paddle.ones([5, 8])),
            ShapeError,
            r"got shape \[5, 8\]; needs \[batch, seq, embed_dim=8\]; unsqueeze\(0\)",
        ),
        (
            lambda: paddle.optimizer.lr.StepDecay(paddle.optimizer.SGD(parameters=_LINEAR.parameters()), 30),
            ArgumentTypeError,
            r"got the optimizer SGD; make the schedule first, .*: SGD\(learning_rate=StepDecay\(0\.1",
        ),
        (
            lambda: paddle.optimizer.SGD(parameters=_LINEAR.parameters),
            ArgumentTypeError,
            r"got one method; write parameters=model\.parameters\(\)",
        ),
        (
            lambda: paddle.optimizer.SGD(parameters=_LINEAR.parameters()).minimize(0.5),
            ArgumentTypeError,
            "minimize: loss is a float; give the Tensor",
        ),
        (lambda: paddle.amp.auto_cast("O1").__enter__(), ArgumentTypeError, "enable='O1'.* the level is level='O1'"),
        (lambda: paddle.ones([1], "bf16"), DTypeError, "'bf16' is not a dtype here; did you mean 'bfloat16'"),
        (lambda: paddle.set_device("gpuu"), DeviceError, "no gpuu is available; did you mean 'gpu'"),
        (lambda: paddle.seed("one"), ConfigError, "seed: 'one'; give an integer"),
        (lambda: paddle.to_tensor([1, None]), DTypeError, "Tensor of list that holds NoneType and int; give numbers"),
        (lambda: paddle.ones([2])["a"], DTypeError, "must be integer or bool, got 'a'"),
        (
            lambda: paddle.concat([paddle.ones([2, 2]), paddle.ones([2])]),
            ShapeError,
            "different numbers of dims.*unsqueeze",
        ),
        (lambda: paddle.io.DataLoader(5), ArgumentTypeError, "dataset is a int; give a Dataset"),
        (lambda: paddle.vision.transforms.Compose(len), ConfigError, "give a list of them"),
        (lambda: paddle.static.InputSpec(8), ConfigError, r"shape=8; give a list of sizes, such as \[None, 784\]"),
        (lambda: paddle.jit.to_static(5), ArgumentTypeError, "got a int; give a function, a method or a Layer"),
        (lambda: paddle.nn.functional.dropout(paddle.ones([2]), p="0.5"), ArgumentTypeError, "p='0.5'; give a number"),
        (lambda: _LINEAR.create_parameter([2, -1]), ShapeError, r"shape \[2, -1\]; sizes are at least 0"),
        (
            lambda: paddle.nn.functional.interpolate(paddle.ones([1, 1, 4, 4]), size=[2]),
            ShapeError,
            r"size=\[2\] for 2 spatial dims; give one number, or 2 of them",
        ),
        (lambda: paddle.onnx, AttributeError, r"no name 'onnx'; write paddle\.jit\.save"),
        (
            _fit_without_labels,
            DataError,
            "called with 1 outputs of the network and 0 labels, .* CrossEntropyLoss takes; a sample of the data is",
        ),
    ],
)
def test_mistakes_of_the_first_day(call, error, says):
    with pytest.raises(error, match=says):
        call()


def test_an_index_out_of_range_names_its_layer():
    net = paddle.nn.Sequential(paddle.nn.Embedding(10, 4))
    with pytest.raises(IndexError, match="needs 0 <= id < 10") as info:
        net(paddle.to_tensor([10]))
    assert info.value.__notes__[0].startswith("in layer 0 (Embedding) of Sequential")


def test_losses_warn_where_every_row_meets_every_label():
    loss = paddle.nn.functional.mse_loss
    with pytest.warns(UserWarning, match=r"test_errors.py:\d+: mse_loss: input \[4, 1\] and label \[4\] broadcast to"):
        loss(paddle.ones([4, 1]), paddle.ones([4]))
    assert float(loss(paddle.ones([4, 1]), paddle.zeros([1]))) == 1  # nothing is repeated
