"""branches: functions on devices of their own equal functions called one after another, and exchange what they must."""

from collections import Counter

import jax
import numpy as np
import pytest

from polyreme import nn
from polyreme.autograd.recompute import run_again
from polyreme.core import rng
from polyreme.distributed import branches
from polyreme.distributed.comm_report.collectives import find_collectives
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.planned_step import PlannedStep
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError, PlacementError
from polyreme.jit import to_static
from polyreme.mesh import Plan, Strategy, branch_parallel
from polyreme.nn import functional as F
from polyreme.ops.layout import constrain
from polyreme.optimizer import SGD
from polyreme.training import StepPolicy

# bp over mp, and an activation split over dp by rows and then by columns
SPLIT = branch_parallel() | Strategy(act={"rows": ("dp",), "cols": ("dp",)})


class Net(nn.Layer):
    """Two branches of x and y with dropout, of which one moves a split; and more dropout after them."""

    def __init__(self, again=False):
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)
        self.again = again

    def forward(self, x, y):
        out = run_again(self.apart, (x, y), {}) if self.again else self.apart(x, y)
        return x + F.dropout(out[0] * 0.5 + out[1], 0.5), y + out[2]

    def apart(self, x, y):
        (kept, total), refined = branches([lambda: self.first(x, y), lambda: self.second(y)])
        return kept, total, refined

    def first(self, x, y):
        h = constrain(F.dropout(self.left(x), 0.5), "rows", None)
        h = constrain(h * y, None, "cols")
        return F.tanh(h), h.cumsum(0)

    def second(self, y):
        return F.tanh(self.right(F.dropout(y, 0.5)))


def step_of(model):
    def step(x, y):
        u, v = model(x, y)
        loss = (u * u).mean() + (v * u).mean()
        loss.backward()
        return loss

    return to_static(step)


def train(make, plan=None):
    """Loss and gradients of a step, and the program's collectives over mp by phase."""
    rng.seed(4)
    model = make()
    values = np.random.default_rng(0).standard_normal((2, 4, 8)).astype("float32")
    x, y = (to_tensor(a, stop_gradient=False) for a in values)
    if plan is not None:
        apply_plan(plan, model, jax.devices()[: plan.mesh.size])
    try:
        step = step_of(model)
        loss = step(x, y)
        sent = Counter()
        if plan is not None:
            instructions = find_collectives(step.compiled(x, y).as_text(), plan.mesh)
            sent = Counter((c.kind, c.parts[0].origin.phase) for c in instructions if c.axes == ("mp",))
        return [loss.numpy(), *(leaf.grad.numpy() for leaf in (x, y, *model.parameters()))], sent
    finally:
        clear_plan()


def assert_equal(got, want):
    for have, wanted in zip(got, want, strict=True):
        # sums of 32 terms of a chain of four products
        np.testing.assert_allclose(have, wanted, rtol=0, atol=2**-24 * 128 * max(1, np.abs(wanted).max()))


def test_branches_equal_one_device_with_one_exchange_each_way():
    want, _ = train(Net)
    got, sent = train(Net, Plan(mesh="dp2 mp2", strategy=SPLIT))
    assert_equal(got, want)
    # forward: both branches' tanh in one permute, the sums in another. Backward: x, and the two layers' weights and
    # biases, which pair up; y is read by both
    assert sent == {
        ("collective-permute", "forward"): 2, ("collective-permute", "backward"): 3, ("all-reduce", "backward"): 1,
    }  # fmt: skip


@pytest.mark.slow
def test_branches_inside_recompute_inside_a_loop():
    def make():
        return nn.Stacked(lambda: Net(again=True), 2)

    want, _ = train(make)
    got, _ = train(make, Plan(mesh="mp2", strategy=SPLIT))
    assert_equal(got, want)


def test_four_branches():
    x = to_tensor(np.arange(1.0, 5.0, dtype="float32"), stop_gradient=False)

    def run(x):
        outs = branches([lambda: x * 2, lambda: (x * x).sum(), lambda: x.exp(), lambda: {"ids": x.astype("int32")}])
        loss = outs[0].sum() + outs[1] + outs[2].mean()
        loss.backward()
        return outs

    want = run(x)
    gradient, x.grad = x.grad.numpy(), None
    apply_plan(Plan(mesh="mp4", strategy=branch_parallel()), nn.Linear(1, 1), jax.devices()[:4])
    try:
        got = to_static(run)(x)
    finally:
        clear_plan()
    for have, wanted in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(have.numpy(), wanted.numpy(), rtol=2**-22)
    np.testing.assert_allclose(x.grad.numpy(), gradient, rtol=2**-22)


def test_refusals():
    with pytest.raises(ConfigError, match="give a list of functions"):
        branches([])
    x = to_tensor([1.0])
    counter = to_tensor([0.0])

    def counting():
        counter.set_value(counter + 1)
        return x

    pairs = [
        (branch_parallel(), [lambda: x], PlacementError, "1 functions over mesh axis mp of 2 devices; set its degree"),
        (branch_parallel(), [counting, lambda: x], CaptureError, "a function writes a Tensor"),
        (
            branch_parallel() | Strategy(act={"heads": ("mp",)}), [lambda: x, lambda: x], PlacementError,
            "splits dim 'heads' too",
        ),
    ]  # fmt: skip
    for strategy, functions, error, match in pairs:
        apply_plan(Plan(mesh="mp2", strategy=strategy), nn.Linear(1, 1), jax.devices()[:2])
        try:
            with pytest.raises(error, match=match):
                to_static(lambda x, functions=functions: branches(functions)[0] + x)(x)
        finally:
            clear_plan()


def test_plans_with_branches():
    plan = Plan.from_degrees(dp=2, sep=2, mp=2, branch_axis="mp")
    assert plan.strategy.rule("act")["bp"] == ("mp",)
    assert "heads" not in plan.strategy.rule("param")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    for settings, match in (
        ({"mp": 2, "branch_axis": "dp"}, "give 'mp', whose devices"),
        ({"branch_axis": "mp"}, "no device to run a branch"),
        ({"mp": 2, "branch_axis": "mp", "sequence_parallel": True}, "drop one of them"),
    ):
        with pytest.raises(ConfigError, match=match):
            Plan.from_degrees(**settings)


def test_devices_for_branches_that_a_model_has_not_are_refused():
    plan = Plan.from_degrees(dp=2, mp=2, branch_axis="mp")
    model = nn.Sequential(nn.Linear(4, 4))
    optimizer = lambda model: SGD(0.1, parameters=model.parameters())
    devices = jax.devices()[:4]
    step = PlannedStep(model, plan, optimizer, StepPolicy(), devices, lambda model, x, y: (model(x) - y).mean())
    x = np.zeros((2, 4), "float32")
    with pytest.raises(
        PlacementError, match=r"'mp' has degree 2 for branches, and Sequential runs none .*; set mp to 1"
    ):
        step(x, x)
    clear_plan()
