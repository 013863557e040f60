"""FLAGS_check_nan_inf: what is found, and that op, layer and step are named, in every world."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyreme import autograd, flags, nn, optimizer, static
from polyreme.core.checked import checked
from polyreme.distributed.fleet.utils import recompute
from polyreme.eager.tensor import Tensor, to_tensor
from polyreme.errors import NumericsError
from polyreme.jit import to_static
from polyreme.nn import functional as F
from polyreme.ops import OPS
from polyreme.program.mode import disable_static, enable_static

GOOD, BAD = np.float32([1, 4]), np.float32([0, 4])
log, sqrt = OPS["log"], OPS["sqrt"]


PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"


@pytest.fixture(autouse=True)
def _switched_on():
    flags.set_flags({"FLAGS_check_nan_inf": True})
    yield
    flags.set_flags({"FLAGS_check_nan_inf": False, "FLAGS_check_nan_inf_level": 0})
    disable_static()


class Root(nn.Layer):
    """sqrt(w x): infinite slope where x is 0."""

    def __init__(self):
        super().__init__()
        self.scale = self.create_parameter([2], default_initializer=nn.initializer.Constant(1.0))

    def forward(self, x):
        return sqrt(self.scale * x)


class Net(nn.Layer):
    def __init__(self):
        super().__init__()
        self.blocks = nn.LayerList([Root(), Root()])

    def forward(self, x):
        return log(self.blocks[1](self.blocks[0](x))).sum()


def worlds(fn):
    return [fn, to_static(fn)]


def test_a_forward_value_is_found_in_eager_and_captured_code():
    net = Net()
    for run in (net, to_static(Net())):
        run(to_tensor(GOOD))
        with pytest.raises(
            NumericsError,
            match=r"log: its result, float32\[2\], has 0 NaN and 1 infinite values of 2, and it was given none; "
            r"in layer Net, training step 1 \(FLAGS_check_nan_inf\)",
        ):
            run(to_tensor(BAD))


def test_a_backward_value_is_found_with_its_layer_and_step():
    x = to_tensor(BAD, stop_gradient=False)
    for capture in (lambda fn: fn, to_static):
        flags.set_flags({"FLAGS_check_nan_inf": True})  # counts from 1 again
        net = Net()
        sgd = optimizer.SGD(0.01, parameters=net.parameters())

        def step(x, net=net, sgd=sgd):
            loss = net.blocks[0](x).sum()
            loss.backward()
            sgd.step()
            sgd.clear_grad()
            return loss

        run = capture(step)
        for _ in range(2):
            run(to_tensor(GOOD))
        with pytest.raises(
            NumericsError,
            match=r"the backward of sqrt: the gradient of input 0.* 1 infinite.* in layer Root, .*step 3 ",
        ):
            run(x)


def test_a_captured_forward_is_watched_when_backward_runs_outside():
    net = to_static(Net().blocks[0])
    loss = net(to_tensor(BAD)).sum()
    with pytest.raises(NumericsError, match=r"the backward of sqrt: the gradient of input 0.*in layer Root"):
        loss.backward()


def test_higher_order_gradients_are_looked_at():
    x = to_tensor(np.float32([0.0]), stop_gradient=False)
    (slope,) = autograd.grad([(x**1.5).sum()], [x], create_graph=True)
    with pytest.raises(NumericsError, match="the backward of pow"):
        autograd.grad([slope.sum()], [x])


def test_the_tape_works_inside_of_captured_code_that_is_differentiated_again():
    x = to_tensor(GOOD, stop_gradient=False)

    @to_static
    def slope(x):
        return autograd.grad([log(x).sum()], [x], create_graph=True)[0]

    (second,) = autograd.grad([slope(x).sum()], [x])
    np.testing.assert_allclose(second.numpy(), -1 / GOOD**2)


def test_branches_loops_and_recomputed_parts_are_looked_into():
    def branch(x):
        if x.sum() > 0:
            y = log(x)
        else:
            y = x
        return y

    def loop(x):
        n = to_tensor(0)
        while n < 3:
            x = log(x)
            n = n + 1
        return x

    def part(x):
        return recompute(lambda v: log(v), x)

    for fn in (branch, loop, part):
        for run in worlds(fn):
            with pytest.raises(NumericsError, match="log: its result"):
                run(to_tensor(BAD))


def test_of_several_faults_the_first_in_the_code_is_named():
    def many(x):
        y = log(x)  # the first
        for _ in range(5):
            y = OPS["exp"](y * y)
        return y

    with pytest.raises(NumericsError, match="log: its result"):
        to_static(many)(to_tensor(BAD))


def test_over_a_mesh():
    mesh = Mesh(np.array(jax.devices()), ("dp",))
    x = Tensor(jax.device_put(np.arange(8, dtype="float32"), NamedSharding(mesh, P("dp"))))
    for run in worlds(lambda x: log(x)):
        with pytest.raises(NumericsError, match=r"log: its result, float32\[8\], has 0 NaN and 1 infinite"):
            run(x)


def test_a_static_program_is_compiled_anew_with_checks():
    enable_static()
    program = static.Program()
    with static.program_guard(program):
        out = log(static.data("x", [2]))
        exe = static.Executor()
        flags.set_flags({"FLAGS_check_nan_inf": False})
        (free,) = exe.run(program, feed={"x": BAD}, fetch_list=[out])
        assert np.isinf(free[0])
        flags.set_flags({"FLAGS_check_nan_inf": True})
        with pytest.raises(NumericsError, match="log: its result"):
            exe.run(program, feed={"x": BAD}, fetch_list=[out])


def test_what_was_asked_for_is_no_fault():
    mask = to_tensor([True, False])
    for run in worlds(lambda x: F.softmax(OPS["masked_fill"](x, mask, float("-inf")))):
        np.testing.assert_array_equal(run(to_tensor(GOOD)).numpy(), [0, 1])
    assert np.isnan(OPS["full"]([2], float("nan")).numpy()).all()
    with pytest.raises(NumericsError, match=r"add: its result.* has 1 NaN .*it was given some"):
        to_tensor([float("nan"), 1.0]) + to_tensor([1.0, 1.0])


def test_level_1_logs_and_goes_on(caplog):
    flags.set_flags({"FLAGS_check_nan_inf_level": 1})
    for run in worlds(lambda x: log(x)):
        assert np.isinf(run(to_tensor(BAD)).numpy()[0])
    assert [r.message.partition(":")[0] for r in caplog.records] == ["log", "log"]


def test_off_nothing_is_put_into_programs():
    flags.set_flags({"FLAGS_check_nan_inf": False})
    captured = to_static(lambda x: log(x))
    text = captured.compiled(to_tensor(BAD)).as_text()
    assert "callback" not in text
    captured(to_tensor(BAD))
    flags.set_flags({"FLAGS_check_nan_inf": True})
    assert "callback" in captured.compiled(to_tensor(BAD)).as_text()
    assert "FLAGS_check_nan_inf: False -> True" in captured.retraces[-1]
    assert checked.late == []


def test_the_page_shows_what_happens():
    (code, shown), *_ = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with pytest.raises(NumericsError) as found:
        exec(compile(code, PAGE.name, "exec"), {"__name__": "page"})
    assert str(found.value) == shown.replace("\n", " ").strip()
