"""MoELayer, its gates and its clip against NumPy, token by token, and over a mesh against one device."""

import jax
import numpy as np
import pytest
import scipy.special as sp

import polyreme as paddle
from polyreme import amp, nn
from polyreme.distributed.comm_report import find_collectives
from polyreme.distributed.communication.group import Group
from polyreme.distributed.placement import apply_plan, clear_plan, shard_batch
from polyreme.distributed.prove import prove
from polyreme.errors import CaptureError, ConfigError, GradError, ShapeError
from polyreme.incubate.distributed.models.moe import (
    BaseGate,
    ClipGradByGlobalNorm,
    ClipGradForMOEByGlobalNorm,
    GShardGate,
    MoELayer,
    NaiveGate,
    SwitchGate,
)
from polyreme.mesh import Plan

D, E = 8, 4
EPS = np.finfo("float32").eps
# sums of at most 32 products, four maps after each other, of values about 8
CLOSE = {"rtol": 512 * EPS, "atol": 512 * 8 * EPS}
X = np.random.default_rng(0).standard_normal((4, 3, D), "float32")


class ExpertLayer(nn.Layer):
    """The expert of the documentation's example, with something that bends."""

    def __init__(self, d_model, d_hidden):
        super().__init__()
        self.htoh4 = nn.Linear(d_model, d_hidden)
        self.h4toh = nn.Linear(d_hidden, d_model)

    def forward(self, x):
        return self.h4toh(paddle.tanh(self.htoh4(x)))


class Dropping(ExpertLayer):
    """An expert that draws random numbers."""

    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5)


def make(gate="naive", top_k=2, experts=None, **options):
    paddle.seed(1)
    experts = experts or [ExpertLayer(D, 6) for _ in range(E)]
    gate = {"type": gate, "top_k": top_k} if isinstance(gate, str) else gate
    return MoELayer(D, experts, gate, **options)


class Fixed(NaiveGate):
    """A gate that is told what to choose."""

    def __init__(self, choices, values):
        super().__init__(D, E, 1, topk=choices.shape[-1])
        self.choices, self.values = choices, values

    def forward(self, inp):
        return paddle.to_tensor(self.values) * inp.sum(-1, keepdim=True), paddle.to_tensor(self.choices)


def train(layer, x=X):
    """Output, and gradients of the mean of its squares for tokens and parameters."""
    x = x if isinstance(x, paddle.Tensor) else paddle.to_tensor(x)
    x.stop_gradient = False
    out = layer(x)
    (out * out).mean().backward()
    return [out.numpy(), x.grad.numpy(), *(None if p.grad is None else p.grad.numpy() for p in layer.parameters())]


def token_by_token(layer, x=X):
    """The same with each expert called on each token that chose it."""
    x = paddle.to_tensor(x, stop_gradient=False)
    rows = x.reshape([-1, D])
    values, experts = layer.gate(rows)
    out = []
    for t, chosen in enumerate(experts.tolist()):
        parts = [values[t, j] * layer.experts[e](rows[t : t + 1]) for j, e in enumerate(chosen) if e >= 0]
        out.append(sum(parts[1:], parts[0]) if parts else rows[t : t + 1] * 0)
    out = paddle.concat(out).reshape(x.shape)
    (out * out).mean().backward()
    return [out.numpy(), x.grad.numpy(), *(None if p.grad is None else p.grad.numpy() for p in layer.parameters())]


def compare(got, want):
    for a, b in zip(got, want, strict=True):
        # an expert that no token chose has a gradient of 0, or none
        if a is not None or b is not None:
            np.testing.assert_allclose(a, np.zeros_like(a) if b is None else b, **CLOSE)


# the rank that gets no token: nobody chooses expert 2, one token chooses none
SKEWED = np.array([[0, 1]] * 5 + [[3, 0]] * 4 + [[-1, -1], [1, -1], [0, 3]], "int64")
VALUES = np.random.default_rng(1).standard_normal(SKEWED.shape).astype("float32")


@pytest.mark.slow
def test_every_token_goes_through_the_experts_that_it_chose():
    gate = Fixed(SKEWED, VALUES)
    want = token_by_token(make(gate))
    compare(train(make(gate)), want)
    assert not want[0].reshape(-1, D)[9].any()
    # computed again in backward, and inside a captured step
    compare(train(make(gate, recompute_interval=1)), want)
    layer = make(gate)
    captured = paddle.jit.to_static(lambda: train_step(layer))
    np.testing.assert_allclose(captured().numpy(), want[0], **CLOSE)
    compare([p.grad.numpy() for p in layer.experts.parameters()], want[2:-2])


def train_step(layer):
    out = layer(paddle.to_tensor(X))
    (out * out).mean().backward()
    return out


def test_one_program_serves_whatever_the_gate_chooses():
    gate = Fixed(SKEWED, VALUES)
    layer = make(gate)
    for choices in (SKEWED, np.zeros_like(SKEWED) - 1, SKEWED[::-1].copy()):
        gate.choices = choices
        layer(paddle.to_tensor(X))
    assert len(layer._captured.programs) == 1


def test_frozen_weights_get_no_gradient_and_others_the_same():
    gradients = []
    for frozen in (False, True):
        paddle.seed(1)
        experts = [ExpertLayer(D, 6) for _ in range(E)]
        experts[1].htoh4.weight.stop_gradient = frozen
        layer = make(experts=experts)
        layer(paddle.to_tensor(X)).sum().backward()
        gradients.append({name: p.grad for name, p in layer.state_dict().items()})
    whole, part = gradients
    assert part.pop("experts.1.htoh4.weight") is None
    for name, gradient in part.items():
        np.testing.assert_allclose(gradient.numpy(), whole[name].numpy(), **CLOSE)


def test_names_are_paddle_s():
    layer = make()
    names = [
        f"experts.{e}.{part}.{kind}" for e in range(E) for part in ("htoh4", "h4toh") for kind in ("weight", "bias")
    ]
    assert list(layer.state_dict()) == [*names, "gate.gate.weight", "gate.gate.bias"]
    layer(paddle.to_tensor(X))
    assert list(layer.state_dict()) == [*names, "gate.gate.weight", "gate.gate.bias"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["other structure", "random numbers", "shared weight"])
def test_experts_that_cannot_be_stacked_are_masked(kind):
    gate = Fixed(SKEWED, VALUES)
    experts = [ExpertLayer(D, 6) for _ in range(E)]
    if kind == "other structure":
        experts[1] = nn.Linear(D, D)
    elif kind == "shared weight":
        experts[1].htoh4.weight = experts[0].htoh4.weight
    else:
        experts = [Dropping(D, 6).eval() for _ in range(E)]
    layer = make(gate, experts=experts)
    if kind == "random numbers":
        out = layer(paddle.to_tensor(X)).numpy()
        assert not out.reshape(-1, D)[9].any()
        assert (out != layer(paddle.to_tensor(X)).numpy()).any()
        return
    want = token_by_token(layer)
    layer.clear_gradients()
    compare(train(layer), want)


@pytest.mark.slow
@pytest.mark.slow_cases("padded")  # tests/kernels/test_experts.py has all dispatchers
@pytest.mark.parametrize("how", ["gather", "padded", "balanced"])
def test_over_a_mesh_it_is_the_same(how):
    gate = Fixed(SKEWED, VALUES)
    want = train(make(gate))
    layer = make(gate)
    try:
        placed = apply_plan(Plan.from_degrees(dp=2, ep=2, mp=2, expert_dispatch=how), layer)
        compare(train(layer, shard_batch(placed, X, "batch", None, None)), want)
    finally:
        clear_plan()


class Net(nn.Layer):
    """A MoELayer between two maps, with the loss of its gate."""

    def __init__(self, gate="gshard"):
        super().__init__()
        self.first, self.moe = nn.Linear(D, D), make(gate, 2)

    def forward(self, x, y):
        out = self.moe(self.first(x))
        return nn.functional.mse_loss(out, y) + 0.01 * self.moe.gate.get_loss()


def adamw(model):
    clip = ClipGradForMOEByGlobalNorm(1.0)
    return paddle.optimizer.AdamW(1e-2, parameters=model.parameters(), grad_clip=clip)


@pytest.mark.parametrize(
    "degrees",
    [
        {"dp": 2, "ep": 2, "sharding": 2, "sharding_stage": 3, "expert_dispatch": "gather"},
        pytest.param({"mp": 2, "ep": 2, "expert_axes": ["ep", "mp"], "num_microbatches": 2}, marks=pytest.mark.slow),
    ],
)
def test_it_is_proved_equal_and_its_checkpoints_move(degrees):
    plan = Plan.from_degrees(**degrees)
    batches = [tuple(np.random.default_rng(n).standard_normal((2, 8, 3, D), "float32")) for n in (1, 2)]
    proof = prove(Net, plan, batches, optimizer=adamw, devices=jax.devices()[: plan.mesh.size])
    assert proof.holds, str(proof)
    compared = {d.name for d in proof.differences if d.what == "gradient"}
    assert {"moe.experts.*.htoh4.weight", "moe.experts.*.h4toh.bias"} <= compared
    assert "model/moe.experts.3.htoh4.weight" in {d.name for d in proof.differences if "checkpoint" in d.what}


@pytest.mark.slow
def test_experts_lie_split_and_their_weights_do_not_move():
    """A device has 1 / ep of weights and state; all-to-alls are those of nn.MoE, and nothing as large as a weight
    moves."""
    plan, width = Plan.from_degrees(ep=4, expert_dispatch="padded"), 256  # weights are larger than all the rows sent
    sent = {}
    for kind in ("MoELayer", "MoE"):
        paddle.seed(1)
        if kind == "MoE":
            net = nn.MoE(D, width, E, 2, activation="relu", gated=False, bias=True)
        else:
            experts = [nn.Sequential(nn.Linear(D, width), nn.ReLU(), nn.Linear(width, D)) for _ in range(E)]
            net = MoELayer(D, experts, {"type": "naive", "top_k": 2})
        try:
            placed = apply_plan(plan, net, jax.devices()[:4])
            optimizer = paddle.optimizer.AdamW(1e-2, parameters=net.parameters())
            optimizer.create_state()

            @paddle.jit.to_static
            def step(x, net=net, optimizer=optimizer):
                out = net(x)
                out = out[0] if isinstance(out, tuple) else out
                out.square().mean().backward()
                optimizer.step()
                optimizer.clear_grad()

            x = shard_batch(placed, X, "batch", None, None)
            found = find_collectives(step.compiled(x).as_text(), plan.mesh)
            sent[kind] = sorted(c.payload for c in found if c.kind == "all-to-all")
            assert max(c.payload for c in found) < 4 * D * width, kind
        finally:
            clear_plan()
        names = {id(p): n for n, p in net.named_parameters()}
        kept = [*net.parameters(), *optimizer.state_arrays(names).values()]
        for array in (getattr(a, "_array", a) for a in kept if a.size >= E * D):
            if array.shape[0] == E:
                assert array.sharding.shard_shape(array.shape) == (1, *array.shape[1:])
    assert sent["MoELayer"] == sent["MoE"]


def test_no_tokens_give_none():
    layer = make(Fixed(SKEWED, VALUES))
    assert layer(paddle.zeros([2, 0, D])).shape == [2, 0, D]


def test_a_second_derivative_is_refused_by_name():
    x = paddle.to_tensor(X, stop_gradient=False)
    (first,) = paddle.grad([make(Fixed(SKEWED, VALUES))(x).square().sum()], [x], create_graph=True)
    with pytest.raises(GradError, match=r"\(MoELayer\), has no second derivative; use nn.MoE"):
        paddle.grad([first.square().sum()], [x])


@pytest.mark.slow
def test_autocast_and_float64():
    gate = Fixed(SKEWED, VALUES)
    want = train(make(gate))[0]
    with amp.auto_cast(dtype="bfloat16"):
        low = make(gate)(paddle.to_tensor(X)).numpy()
    np.testing.assert_allclose(low, want, atol=32 * 2.0**-8, rtol=0)
    assert (low != want).any()


# ---- gates ----


def logits_of(gate, x):
    return x @ gate.gate.weight.numpy() + gate.gate.bias.numpy()


def test_naive_gate_gives_the_greatest_logits():
    gate, x = NaiveGate(D, 2, 2), X.reshape(-1, D)
    logits = logits_of(gate, x)
    values, experts, scores = gate(paddle.to_tensor(x), return_all_scores=True)
    best = np.argsort(-logits, -1)[:, :2]
    assert experts.tolist() == best.tolist()
    assert (gate.tot_expert, experts.dtype, gate.get_loss()) == (4, paddle.int64, None)
    np.testing.assert_allclose(values.numpy(), np.take_along_axis(logits, best, -1), **CLOSE)
    np.testing.assert_allclose(scores.numpy(), logits, **CLOSE)


def within(best, capacity):
    """Choices of which each expert takes the first in the order of tokens."""
    taken, left = [0] * E, best.copy()
    for place in np.ndindex(best.shape):
        expert = best[place]
        left[place] = expert if taken[expert] < capacity else -1
        taken[expert] += 1
    return left


def test_gshard_gate():
    gate, x = GShardGate(D, E, 1, capacity=(0.3, 9.0), random_routing=False), X.reshape(-1, D)
    logits = logits_of(gate, x)
    best = np.argsort(-logits, -1)[:, :2]
    _, experts = gate(paddle.to_tensor(x))
    assert experts.tolist() == within(best, 4).tolist()
    load = np.bincount(best.reshape(-1), minlength=E) / len(x)
    want = (load * sp.softmax(logits, -1).mean(0)).mean() * E**2
    np.testing.assert_allclose(gate.get_loss(clear=False).item(), want, rtol=64 * EPS)
    gate.get_loss().backward()
    assert gate.gate.weight.grad.abs().sum().item() > 0
    assert gate.get_loss() is None
    gate.eval()
    assert gate(paddle.to_tensor(x))[1].tolist() == best.tolist()
    # second experts whose logit is below zero are left out whatever is drawn, first ones never
    gate.random_routing = True
    values, experts = (part.numpy() for part in gate(paddle.to_tensor(x)))
    assert (experts[values[:, 1] < 0, 1] == -1).all()
    assert (experts[values[:, 1] >= 0.5, 1] >= 0).all()
    assert (experts[:, 0] == best[:, 0]).all()


def test_switch_gate():
    gate, x = SwitchGate(D, E, 1, capacity=(9.0, 0.3)), X.reshape(-1, D)
    share = sp.softmax(logits_of(gate, x), -1)
    gate.eval()
    values, experts = gate(paddle.to_tensor(x))
    want = within(share.argmax(-1)[:, None], 4)
    assert experts.tolist() == want.tolist()
    np.testing.assert_allclose(values.numpy()[:, 0], share.max(-1), **CLOSE)
    count = (want >= 0).sum()
    load = np.array([(want == e).sum() for e in range(E)])
    loss = E * (load / count * share.sum(0) / count).sum()
    np.testing.assert_allclose(gate.get_loss().item(), loss, rtol=64 * EPS)
    gate.train()
    paddle.seed(3)
    noisy = gate(paddle.to_tensor(x))[0].numpy()
    assert (noisy != values.numpy()).any()
    # noise of one token's logits differs by 0.2 at most
    np.testing.assert_allclose(np.log(noisy), np.log(values.numpy()), atol=0.2)


@pytest.mark.slow
def test_the_documentation_s_layer_trains():
    """Paddle#75940: the example of the documentation, with a group of this one process."""
    group = Group(0, 0, [0], "_default_pg")
    gate = {"type": "gshard", "top_k": 2}
    layer = MoELayer(D, nn.LayerList([ExpertLayer(D, 256) for _ in range(8)]), gate, group, None, recompute_interval=0)
    clip = ClipGradForMOEByGlobalNorm(0.01, lambda p: "expert" in p.name, group)
    optimizer = paddle.optimizer.SGD(1.0, parameters=layer.parameters(), grad_clip=clip)
    before = [p.numpy() for p in layer.parameters()]
    (layer(paddle.to_tensor(X)).square().mean() + layer.gate.get_loss()).backward()
    optimizer.step()
    moved = np.sqrt(sum(((p.numpy() - b) ** 2).sum() for p, b in zip(layer.parameters(), before, strict=True)))
    # differences of values about 1 are rounded, some 1,000 of them that move
    np.testing.assert_allclose(moved, 0.01, atol=1e3 * EPS)
    assert ClipGradByGlobalNorm is ClipGradForMOEByGlobalNorm


class Means(nn.Layer):
    """No expert: what it gives has no rows."""

    def forward(self, x):
        return x.mean(0)


class Counting(nn.Layer):
    """An expert that remembers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", paddle.zeros([]))

    def forward(self, x):
        self.count.set_value(self.count + x.sum())
        return x


def test_what_is_no_mixture_is_refused():
    with pytest.raises(ConfigError, match=r"experts\.0\.1 is a BatchNorm1D, whose statistics"):
        make(experts=[nn.Sequential(nn.Linear(D, D), nn.BatchNorm1D(D))])
    with pytest.raises(ConfigError, match="experts is empty"):
        MoELayer(D, [])
    with pytest.raises(ConfigError, match="did you mean 'gshard'"):
        make("gshrad")
    with pytest.raises(ConfigError, match="GShardGate: topk=1; it chooses 2"):
        make("gshard", 1)
    with pytest.raises(ConfigError, match="SwitchGate: topk=2; it chooses 1"):
        make("switch", 2)
    with pytest.raises(ConfigError, match=r"2 x 4 = 8 experts, but 4 experts; experts is the list of all"):
        make(NaiveGate(D, 2, 4))
    with pytest.raises(ConfigError, match="gate is a BaseGate; give a dict"):
        make(BaseGate(E, 1))
    with pytest.raises(ConfigError, match="MoELayer: moe_group has 2 processes; experts is the list of all experts"):
        make(moe_group=Group(0, 5, [0, 1], "two"))
    with pytest.raises(ConfigError, match="moe_group must be a Group, got int"):
        ClipGradForMOEByGlobalNorm(1.0, moe_group=2)
    with pytest.raises(ShapeError, match=r"tokens \[3, 8\]; needs \[batch, seq, 8\]"):
        make()(paddle.to_tensor(X[0]))
    with pytest.raises(ShapeError, match=r"an expert gives \[8\] for tokens \[32, 8\]"):
        make(experts=[Means() for _ in range(E)])(paddle.to_tensor(X))
    with pytest.raises(CaptureError, match="an expert writes a Tensor when it is called"):
        make(experts=[Counting() for _ in range(E)])(paddle.to_tensor(X))
    with pytest.raises(NotImplementedError, match="BaseGate must define forward"):
        BaseGate(E, 1)(paddle.to_tensor(X))
