"""MoE and Router: against every token through every expert, captured, under autocast; capacities, losses, refusals."""

import copy

import numpy as np
import pytest
import scipy.special as sp

import polyreme as paddle
from polyreme import nn
from polyreme.errors import ConfigError, DTypeError, ShapeError
from polyreme.nn import functional as F

EPS = float(np.finfo(np.float32).eps)


def layer(**settings):
    paddle.seed(3)
    return nn.MoE(6, 10, 5, **settings)


def tokens(*shape):
    return paddle.to_tensor(np.random.default_rng(0).standard_normal((*shape, 6)).astype("float32"))


def by_numpy(moe, x):
    """Each token through all experts, weighed by its gates."""
    weights = {name: p.numpy().astype(np.float64) for name, p in moe.named_parameters()}
    scores = sp.softmax(x @ weights["router.weight"], -1)
    best = np.sort(scores, -1)[..., -2:-1]
    gates = np.where(scores >= best, scores, 0)
    gates /= gates.sum(-1, keepdims=True)
    out = 0
    for e in range(5):
        hidden = x @ weights["up"][e] + weights["up_bias"][e]
        hidden = hidden * sp.expit(x @ weights["gate"][e]) * (x @ weights["gate"][e])
        out = out + gates[..., e : e + 1] * (hidden @ weights["down"][e] + weights["down_bias"][e])
    gate, up, down = (weights[f"shared.{name}.weight"] for name in ("gate", "up", "down"))
    hidden = sp.expit(x @ gate) * (x @ gate) * (x @ up + weights["shared.up.bias"])
    shared = hidden @ down + weights["shared.down.bias"]
    return out + sp.expit(x @ weights["shared.token_gate.weight"]) * shared


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 7), (9,)])
def test_equals_every_token_through_every_expert(shape):
    moe, x = layer(bias=True, shared_hidden=7, shared_gate=True), tokens(*shape)
    captured = paddle.jit.to_static(moe)
    want = by_numpy(moe, x.numpy().astype(np.float64))
    for call in (moe, captured):
        out, loss = call(x)
        np.testing.assert_allclose(out.numpy(), want, rtol=0, atol=64 * EPS * np.abs(want).max())
        assert loss.item() == 0


def test_ids_choose_experts_that_nothing_is_learned_of():
    moe, x = layer(router=nn.HashRouter(5, top_k=2, seed=1)), tokens(4, 50)
    ids = np.random.default_rng(1).integers(0, 2**31, (4, 50))
    ids[3] = ids[2]
    choices, gates, loss, load = moe.router(paddle.to_tensor(ids))
    assert (choices.dtype, gates.numpy().tolist(), loss.item()) == (paddle.int32, np.full((4, 50, 2), 0.5).tolist(), 0)
    first = [(i * moe.router.factor + moe.router.offset) % (2**31 - 1) % 5 for i in ids.ravel().tolist()]
    want = np.stack([first, np.add(first, 1) % 5], -1).reshape(4, 50, 2)
    np.testing.assert_array_equal(choices.numpy(), want)
    np.testing.assert_array_equal(load.numpy(), np.bincount(want.ravel(), minlength=5))
    assert load.numpy().min() > 50  # 80 on the mean
    out, _ = moe(x, ids=paddle.to_tensor(ids))
    by_hand = F.experts_ffn(x, choices, gates, moe.up, moe.down, moe.gate)
    np.testing.assert_array_equal(out.numpy(), by_hand.numpy())
    for call in (lambda: moe(x), lambda: layer()(x, ids=paddle.to_tensor(ids))):
        with pytest.raises(ConfigError, match=r"MoE: a (HashRouter takes ids and no allowed|Router takes no ids)"):
            call()
    with pytest.raises(ShapeError, match=r"ids \[4\] of x \[4, 50, 6\]; give one id for each token"):
        moe(x, ids=paddle.to_tensor(ids[:, 0]))
    with pytest.raises(ConfigError, match="HashRouter: top_k=6 of 5 experts; give 1 to 5"):
        nn.HashRouter(5, top_k=6)


def test_a_capacity_of_ids_drops_later_tokens():
    ids = paddle.to_tensor(np.full((2, 10), 7))
    routing = nn.HashRouter(5, capacity_factor=1.5)(ids)
    is_left = routing.choices.numpy()[..., 0] >= 0
    # 1.5 of an even share of 20 / 5
    assert is_left.tolist() == [[True] * 6 + [False] * 4, [False] * 10]
    assert routing.load.numpy().max() == 20
    with pytest.raises(ConfigError, match="HashRouter: capacity_factor=0; give a number above 0"):
        nn.HashRouter(5, capacity_factor=0)


@pytest.mark.slow
def test_experts_choose_tokens_and_leave_some_alone():
    moe, x = layer(router=nn.ExpertChoiceRouter(6, 5, top_k=1, capacity_factor=0.7, z_loss=0.1)), tokens(3, 10)
    x.stop_gradient = False
    routing = moe.router(x)
    # 0.7 * 10 / 5, rounded up, of each sequence
    np.testing.assert_array_equal((routing.choices.numpy() >= 0).sum(1), np.full((3, 5), 2))
    out, loss = moe(x)
    assert loss.item() == pytest.approx(0.1 * F.router_z_loss(F.router_logits(x, moe.router.weight)).item(), rel=1e-6)
    chosen = (routing.choices.numpy() >= 0).any(-1)
    assert 0 < chosen.sum() < 30
    np.testing.assert_array_equal(out.numpy().any(-1), chosen)
    weights = [x, moe.router.weight, moe.up, moe.down]
    by_hand = F.experts_ffn(x, routing.choices, routing.gates, moe.up, moe.down, moe.gate)
    computed, wanted = ([y, *paddle.grad(y.square().sum(), weights)] for y in (out, by_hand))
    for got, want in zip(computed, wanted, strict=True):
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=0, atol=64 * EPS * np.abs(want.numpy()).max())
        assert want.numpy().any()
    everything = nn.ExpertChoiceRouter(6, 5, capacity_factor=9.0)(x)
    assert (everything.choices.numpy() >= 0).all()


def test_a_capacity_is_that_of_the_factor_as_it_is_written():
    # 1.1 * 100 in binary is more than 110
    assert [nn.Router(6, 10, 1, capacity_factor=f).capacity(100) for f in (1.1, 1.11, 0.01)] == [11, 12, 1]


def test_no_token_at_all_gives_nothing():
    moe = layer(router=nn.Router(6, 5, balance_loss=0.1, z_loss=0.1, capacity_factor=1.0))
    out, loss = moe(tokens(0))
    assert (out.shape, loss.item()) == ([0, 6], 0)
    out.sum().backward()
    assert not moe.up.grad.numpy().any()


def test_routing_is_float32_under_autocast():
    moe, x = layer(), tokens(4, 8)
    want = moe.router(x)
    with paddle.amp.auto_cast(dtype="bfloat16"):
        routing, (out, _) = moe.router(x), moe(x)
    assert out.dtype == paddle.bfloat16
    np.testing.assert_array_equal(routing.gates.numpy(), want.gates.numpy())
    np.testing.assert_array_equal(routing.choices.numpy(), want.choices.numpy())


@pytest.mark.slow
def test_an_expert_without_tokens_gets_no_gradient_and_changes_nothing():
    moe, x = layer(), tokens(12)
    allowed = paddle.to_tensor(np.array([True, True, True, False, True]))
    out, _ = moe(x, allowed)
    out.sum().backward()
    for name in ("gate", "up", "down"):
        gradient = getattr(moe, name).grad.numpy()
        assert np.isfinite(gradient).all()
        assert not gradient[3].any()
        assert gradient[0].any()


def test_losses_add_up():
    x, weights = tokens(3, 4), {"balance_loss": 0.1, "sequence_loss": 0.02, "z_loss": 0.003}
    paddle.seed(1)
    router = nn.Router(6, 5, **weights)
    routing = router(x)
    logits = F.router_logits(x, router.weight)
    choices, _, scores = F.choose_experts(logits)
    parts = [
        F.balance_loss(scores, choices),
        F.balance_loss(scores, choices, per_sequence=True),
        F.router_z_loss(logits),
    ]
    want = sum(w * part.item() for w, part in zip(weights.values(), parts, strict=True))
    assert routing.loss.item() == pytest.approx(want, rel=1e-6)
    routing.loss.backward()
    assert router.weight.grad.numpy().any()


def test_a_balance_over_the_global_batch_counts_the_microbatches_so_far():
    paddle.seed(1)
    router = nn.Router(6, 5, balance_loss=0.5, balance_scope="global_batch")
    optimizer = paddle.optimizer.SGD(0.0, parameters=router.parameters())

    @paddle.jit.to_static
    def step(parts):
        losses = []
        for x in parts:
            losses.append(router(x).loss)
            losses[-1].backward()
        optimizer.step()
        gradient = router.weight.grad * 1
        optimizer.clear_grad()
        return losses, gradient

    for seed in range(2):  # the second step counts anew
        parts = paddle.to_tensor(np.random.default_rng(seed).standard_normal((3, 4, 6)).astype("float32"))
        losses, gradient = step(parts)
        counts, want_gradient = np.zeros(5, "int32"), 0
        for i, x in enumerate(parts):
            choices, _, scores = F.choose_experts(F.router_logits(x, router.weight))
            counts += np.bincount(choices.numpy().ravel(), minlength=5).astype("int32")
            want = 0.5 * F.balance_loss(scores, choices, counts=paddle.to_tensor(counts))
            assert losses[i].item() == pytest.approx(want.item(), rel=8 * EPS)
            assert (losses[i].item() == pytest.approx(0.5 * F.balance_loss(scores, choices).item())) == (i == 0)
            want_gradient = want_gradient + paddle.grad(want, router.weight)[0].numpy()
        np.testing.assert_allclose(gradient.numpy(), want_gradient, rtol=0, atol=24 * EPS * np.abs(want_gradient).max())
    router.eval()  # a batch counts itself
    routing, (choices, _, scores) = router(x), F.choose_experts(F.router_logits(x, router.weight))
    assert routing.loss.item() == pytest.approx(0.5 * F.balance_loss(scores, choices).item(), rel=8 * EPS)
    router.train()
    router.weight.stop_gradient = True
    with pytest.raises(ConfigError, match=r"'global_batch' with a frozen weight, .* give 'micro_batch', or a balance"):
        router(x)
    with pytest.raises(ConfigError, match="balance_loss: counts with per_sequence; a sequence has its own"):
        F.balance_loss(scores, choices, per_sequence=True, counts=paddle.to_tensor(counts))


def test_the_selection_bias_is_saved_and_no_parameter():
    router = nn.Router(6, 5, selection_bias=True)
    assert "selection_bias" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]
    router.selection_bias.set_value(np.array([0, 0, 9, 0, 9], "float32"))
    routing = router(tokens(8))
    assert set(routing.choices.numpy().reshape(-1)) == {2, 4}


def test_numbers_are_no_mask_and_no_expert():
    logits = paddle.to_tensor(np.zeros((2, 3), "float32"))
    with pytest.raises(DTypeError, match="allowed is float32; give bool, True where a token may choose"):
        F.choose_experts(logits, allowed=paddle.to_tensor(np.array([-np.inf, 0, 0], "float32")))
    up, down = paddle.ones([2, 6, 4]), paddle.ones([2, 4, 6])
    with pytest.raises(IndexError, match="experts_ffn: expert: 2 at"):
        F.experts_ffn(tokens(1), paddle.to_tensor([[0, 2]]), paddle.ones([1, 2]), up, down)
    masks = paddle.ones([3, 5], "bool"), paddle.ones([4, 3, 5], "bool")
    for mask in masks:
        with pytest.raises(ShapeError, match=r"choose_experts: allowed .* it must broadcast to them: what counts"):
            layer()(tokens(3, 2) if mask is masks[0] else tokens(3), mask)
    choices, gates = paddle.to_tensor([[0.5, 1.0]]), paddle.ones([1, 2])
    calls = {
        "experts_ffn": lambda: F.experts_ffn(tokens(1), choices, gates, up, down),
        "expert_load": lambda: F.expert_load(choices, 2),
        "limit_experts": lambda: F.limit_experts(choices, gates, 2, 1),
        "balance_loss": lambda: F.balance_loss(gates, choices),
    }
    for name, call in calls.items():
        with pytest.raises(DTypeError, match=f"{name}: choices are float32; give integers"):
            call()
    whole = paddle.to_tensor([[0, 1]])
    with pytest.raises(ConfigError, match=r"limit_experts: capacity=1\.5; give an integer"):
        F.limit_experts(whole, gates, 2, 1.5)
    with pytest.raises(ConfigError, match="expert_load: num_experts=-1; give a whole number"):
        F.expert_load(whole, -1)
    with pytest.raises(ShapeError, match=r"balance_loss: scores \[3, 2\] and choices \[1, 2\]; needs"):
        F.balance_loss(paddle.ones([3, 2]), whole)
    with pytest.raises(DTypeError, match="HashRouter: ids are float32; give integers"):
        nn.HashRouter(5)(paddle.to_tensor([1.5]))
    with pytest.raises(IndexError, match="HashRouter: id: -1 at"):
        nn.HashRouter(5)(paddle.to_tensor([-1]))
    with pytest.raises(ShapeError, match="3 choices of a token among 2 experts"):
        F.experts_ffn(tokens(1), paddle.to_tensor([[0, 1, 0]]), paddle.ones([1, 3]), up, down)


@pytest.mark.parametrize("score", ["sigmoid", "sqrtsoftplus"])
def test_gates_of_small_scores_are_shares_with_gradients(score):
    logits = paddle.to_tensor(np.array([[-48, -49, -300, -np.inf]], "float32"), stop_gradient=False)
    _, gates, _ = F.choose_experts(logits, score=score)
    gates[..., 0].sum().backward()
    share = sp.expit(1.0) if score == "sigmoid" else sp.expit(0.5)
    slope = share * (1 - share) * (1.0 if score == "sigmoid" else 0.5)
    # exp of numbers near 50 in float32
    np.testing.assert_allclose(gates.numpy(), [[share, 1 - share]], rtol=100 * EPS)
    np.testing.assert_allclose(logits.grad.numpy(), [[slope, -slope, 0, 0]], rtol=0, atol=100 * EPS)


def test_a_copy_moves_its_own_bias():
    router = nn.Router(6, 5, bias_rate=0.25)
    copied = copy.deepcopy(router)
    optimizer = paddle.optimizer.SGD(0.0, parameters=copied.parameters())
    copied(tokens(9)).gates[..., 0].sum().backward()
    optimizer.step()
    assert copied.selection_bias.numpy().any()
    assert not router.selection_bias.numpy().any()


def test_a_step_moves_the_bias_once_by_the_load_of_its_microbatches():
    paddle.seed(2)
    router = nn.Router(6, 5, bias_rate=0.25, capacity_factor=0.75)
    router.keep_load()
    optimizer = paddle.optimizer.SGD(0.0, parameters=router.parameters())

    def backward(x):
        routing = router(x)
        routing.gates[..., 0].sum().backward()
        return routing.load

    @paddle.jit.to_static
    def step(x):
        loads = [backward(part) for part in x]
        optimizer.step()
        optimizer.clear_grad()
        return loads

    for seed in range(2):
        x = np.random.default_rng(seed).standard_normal((2, 9, 6)).astype("float32")
        before = router.selection_bias.numpy()
        loads = [part.numpy() for part in step(paddle.to_tensor(x))]
        load = sum(loads)
        assert load.sum() == 2 * 9 * 2
        np.testing.assert_array_equal(router.last_load.numpy(), load)
        # of 9 tokens an expert takes 0.75 * 9 * 2 / 5 = 2.7, so 3
        assert router.last_dropped.item() == sum(np.maximum(part - 3, 0).sum() for part in loads) > 0
        want = before + 0.25 * np.sign(load.mean() - load)
        np.testing.assert_array_equal(router.selection_bias.numpy(), want.astype("float32"))
    router.eval()
    router(tokens(4))
    assert not router.step_load.numpy().any()
    np.testing.assert_array_equal(router.last_load.numpy(), load)
    assert not {"step_load", "last_load", "last_dropped"} & router.state_dict().keys()
    router.train()
    backward(tokens(4))
    optimizer.step(skip=paddle.to_tensor(True))
    np.testing.assert_array_equal(router.selection_bias.numpy(), want.astype("float32"))
    assert not router.step_load.numpy().any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: nn.MoE(6, 0, 5), "MoE: d_hidden=0; give a whole number of at least 1"),
        (lambda: nn.MoE(6, 8, 5.0), "MoE: num_experts=5.0; give a whole number"),
        (lambda: nn.MoE(6, 8, 5, shared_hidden=-2), "MoE: shared_hidden=-2; give a whole number"),
        (lambda: nn.MoE(6, 8, 5, router=nn.Linear(6, 5)), "router is a Linear; give a Router, an Exp"),
        (lambda: nn.MoE(6, 8, 5, top_k=2, router=nn.Router(6, 5, 1)), "top_k=2, but a router of top_k=1, which"),
        (lambda: nn.MoE(6, 8, 5, shared_gate=True), "a shared gate needs a shared expert"),
        (lambda: nn.MoE(6, 8, 5, router=nn.Router(6, 4)), "5 experts, but a router of 4; give it as many"),
        (lambda: nn.Router(6, 5, bias_rate=-1), "bias_rate=-1; give a number above 0"),
        (lambda: nn.Router(6.0, 5), "Router: d_model=6.0; give a whole number"),
        (lambda: nn.Router(6, 5, groups=1.0), "Router: groups=1.0; give a whole number"),
        (lambda: nn.Router(6, 5, top_k=True), "Router: top_k=True; give a whole number"),
        (lambda: nn.Router(6, 5, scale=float("nan")), "Router: scale=nan; give a number"),
        (lambda: nn.Router(6, 5, capacity_factor=float("inf")), "capacity_factor=inf; give a number above 0, or None"),
        (lambda: nn.Router(6, 5, capacity_factor=0), "capacity_factor=0; give a number above 0"),
        (lambda: nn.ExpertChoiceRouter(6, 5, capacity_factor=0), "capacity_factor=0, z_loss=0.0; give a capacity_f"),
        (lambda: nn.Router(6, 5, top_k=6), "Router: top_k=6 of 5 experts; give 1 to 5"),
        (lambda: nn.Router(6, 5, score="tanh"), "Router: unknown score 'tanh'"),
        (lambda: nn.Router(6, 5, capacity_by="gates"), "capacity_by='gates'; give 'order' or 'gate'"),
        (lambda: nn.Router(6, 5, z_loss=-1.0), "z_loss=-1.0; give weights of at least 0"),
        (
            lambda: nn.Router(6, 5, score="logits", balance_loss=0.1),
            "with score='logits', whose shares may be",
        ),
        (
            lambda: nn.Router(6, 5, balance_loss=1.0, balance_scope="step"),
            "balance_scope='step'; one of micro_batch, gl",
        ),
        (lambda: nn.Router(6, 5, balance_scope="global_batch"), "without a balance_loss; give its weight, or leave"),
        (lambda: nn.MoE(6, 8, 5, activation="tanh"), "MoE: unknown activation 'tanh'"),
    ],
)
def test_refuses_what_does_not_fit(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
