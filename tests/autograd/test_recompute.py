"""Recompute: equal to the plain call, eager and captured, and cheaper in memory."""

import gc
import re
import weakref

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme.autograd import PyLayer, grad, saved_tensors_hooks
from polyreme.autograd.recompute import Keep, chosen, in_block, run_again
from polyreme.core import layout
from polyreme.core.engine import backend, xla_flags
from polyreme.core.layout import Layout
from polyreme.distributed.fleet.recompute import recompute, recompute_hybrid, recompute_sequential
from polyreme.eager.tensor import Tensor
from polyreme.errors import CaptureError, ConfigError, GradError
from polyreme.jit import to_static
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.models.decoders.llama import LlamaConfig
from polyreme.nn import GELU, BatchNorm1D, ClipGradByGlobalNorm, Dropout, Linear, Sequential, Tanh
from polyreme.optimizer import SGD

EPS = np.finfo(np.float32).eps
X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def near(a, b, terms=64):
    """Equal up to the rounding of sums of `terms` numbers of the size of the largest, in two orders."""
    a, b = np.asarray(a), np.asarray(b)
    assert a.shape == b.shape
    assert np.abs(a - b).max(initial=0) <= 4 * np.sqrt(terms) * EPS * max(np.abs(b).max(initial=0), 1)


def train(call, static):
    """Loss, gradients, statistics and random state after a step of a net with dropout and batch statistics."""
    paddle.seed(3)
    net = Sequential(Linear(8, 16), BatchNorm1D(16), GELU(), Dropout(0.3), Linear(16, 8))
    before = Linear(8, 8)

    def step(x):
        y = call(net, before(x))
        loss = (y * y).mean()
        loss.backward()
        return loss

    loss = (to_static(step) if static else step)(Tensor(X))
    values = [loss, *(p.grad if p.trainable else p for p in (*net.parameters(), *before.parameters()))]
    return [v.numpy() for v in values], paddle.get_rng_state()[0]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("keep", [Keep(), Keep(offload=True)], ids=["device", "host"])
@pytest.mark.parametrize("static", [False, True], ids=["eager", "captured"])
def test_equals_the_plain_call(static, keep):
    plain, key = train(lambda f, x: f(x), False)
    again, key_after = train(lambda f, x: run_again(f, (x,), {}, keep), static)
    for a, b in zip(again, plain, strict=True):
        near(a, b)
    np.testing.assert_array_equal(key_after, key)


def test_what_is_kept_is_the_inputs_only():
    refs = []

    class Probe(PyLayer):
        @staticmethod
        def forward(ctx, x):
            made = x * 2
            refs.append(weakref.ref(made._array))
            ctx.save_for_backward(made)
            return made + 0

        @staticmethod
        def backward(ctx, g):
            return g * 2

    x = Tensor(X, stop_gradient=False)
    plain = Probe.apply(x)
    y = recompute(Probe.apply, x)
    gc.collect()
    assert [ref() is None for ref in refs] == [False, True]
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), np.full_like(X, 2))
    assert len(refs) == 3, "the function ran once more"
    del plain


@pytest.fixture(params=[pytest.param(False, marks=pytest.mark.slow), True], ids=["several devices", "one device"])
def alone(request, monkeypatch):
    """Whether steps have the order of operations of a process with one device; and gives them that order."""
    tables = [xla_flags.OPTIONS, *([xla_flags.ONE_DEVICE] if request.param else [])]
    options = {name: value for table in tables for name, value in xla_flags.chosen("cpu", {}, table).items()}
    monkeypatch.setattr(backend, "step_options_for", lambda *of: options)
    return request.param


def test_temporary_memory_of_a_captured_step_falls(alone):
    def step_of(recomputed=False, microbatches=1):
        paddle.seed(0)
        blocks = [Sequential(Linear(16, 64), Tanh(), Linear(64, 16)) for _ in range(6)]
        parameters = [p for block in blocks for p in block.parameters()]
        # the norm of all gradients, which any update waits for
        optimizer = SGD(0.1, parameters=parameters, grad_clip=ClipGradByGlobalNorm(1.0))

        @to_static
        def step(rows):
            total = 0.0
            for x in rows.chunk(microbatches):
                for block in blocks:
                    x = recompute(block, x) if recomputed else block(x)
                loss = (x * x).mean() / microbatches
                loss.backward()
                total = total + loss.detach()
            optimizer.step()
            optimizer.clear_grad()
            return total

        rows = Tensor(np.linspace(-1, 1, 16384, dtype=np.float32).reshape(1024, 16))
        loss, scratch = step(rows).item(), step.compiled(rows).memory_analysis().temp_size_in_bytes
        return loss, [p.numpy() for p in parameters], scratch

    plain, again = step_of(), step_of(recomputed=True)
    assert again[0] == plain[0]
    for a, b in zip(again[1], plain[1], strict=True):
        np.testing.assert_array_equal(a, b)
    # a block leaves its input of 64 KiB and 256 KiB of tanh, or its input alone
    assert again[2] < plain[2] / 2
    if alone:  # a microbatch is half of the rows, and begins when the one before has ended
        assert step_of(microbatches=2)[2] < 0.7 * plain[2]


def test_offloaded_inputs_go_to_host_memory():
    first, second = Linear(8, 8), Linear(8, 8)

    @to_static
    def step(x):
        y = run_again(second, (first(x),), {}, Keep(offload=True))
        y.sum().backward()
        return y

    step(Tensor(X))
    (program,) = step.concrete_programs()
    arrays = [t._array for t in program._current()]
    state, rest = arrays[: program._num_written], arrays[program._num_written :]
    # for a CPU, whose memory is the host's, jax writes no moves
    text = program._jitted.trace(state, rest, X).lower(lowering_platforms=("cuda",)).as_text()
    moves = re.findall(r'annotate_device_placement.*_xla_buffer_placement = "(\w+)"', text)
    assert moves == ["pinned_host", "device"]


def test_eager_offload_moves_and_frees_the_argument():
    x = Tensor(X, stop_gradient=False)
    h = x * 2
    y = run_again(lambda v: v * v, (h,), {}, Keep(offload=True))
    (array,) = (held.array for held in y._node.inputs)
    assert array.sharding.memory_kind == "pinned_host"
    alive = weakref.ref(h)
    del h
    gc.collect()
    assert alive() is None
    y.sum().backward()
    near(x.grad.numpy(), 8 * X)


def test_gradients_reach_what_the_function_closes_over():
    w, h = Tensor(X, stop_gradient=False), Tensor(X, stop_gradient=False)
    computed = h * 3
    seen = []
    w.register_hook(lambda g: seen.append(g.numpy()))
    y = recompute(lambda a: a * w * computed, Tensor(X))  # no argument wants a gradient
    y.sum().backward()
    near(w.grad.numpy(), 3 * X * X)
    near(h.grad.numpy(), 3 * X * X)
    assert len(seen) == 1


def test_reading_a_tensor_and_what_was_computed_from_it_counts_each_once():
    w = Tensor(X, stop_gradient=False)
    square = w * w
    recompute(lambda a: a + square * w, square).sum().backward()
    near(w.grad.numpy(), 2 * X + 3 * X * X)


def test_structures_none_numbers_and_keywords():
    def function(pair, scale=1, *, bias=None, flag=None):
        a, b = pair["pair"]
        assert flag is None
        return {"sum": (a + b) * scale, "same": a, "ids": Tensor(np.arange(3))}, bias + a, 7

    for static in (False, True):
        a, b = Tensor(X, stop_gradient=False), Tensor(X + 1, stop_gradient=False)

        def step(a, b):
            return recompute(function, {"pair": [a, b]}, scale=2.0, bias=b, flag=None)

        named, biased, seven = (to_static(step) if static else step)(a, b)
        assert seven == 7
        assert named["ids"].stop_gradient
        (named["sum"] * biased + named["same"]).sum().backward()
        near(a.grad.numpy(), 2 * (2 * X + 1) * 2 + 1)
        near(b.grad.numpy(), 2 * (2 * X + 1) * 2)


def test_one_tensor_given_twice_is_one_tensor():
    x = Tensor(X, stop_gradient=False)

    def function(a, b):
        a.add_(a)
        return a * b

    recompute(function, *[x * 1] * 2).sum().backward()
    near(x.grad.numpy(), 8 * X)
    x.clear_grad()
    recompute(lambda a, b: a * b, x, x).sum().backward()
    near(x.grad.numpy(), 2 * X)


def test_nested_and_frozen():
    for static in (False, True):
        paddle.seed(0)
        inner, outer = Linear(8, 8), Linear(8, 8)
        inner.weight.stop_gradient = True
        x = Tensor(X, stop_gradient=False)

        def block(v):
            return recompute(lambda u: inner(u).tanh(), outer(v)) * v  # noqa: B023

        def step(v):
            recompute(block, v).sum().backward()

        (to_static(step) if static else step)(x)
        assert inner.weight.grad is None
        got = [t.grad.numpy() for t in (x, inner.bias, outer.weight)]
        for t in (x, inner.bias, outer.weight):
            t.clear_grad()
        (inner(outer(x)).tanh() * x).sum().backward()
        for a, t in zip(got, (x, inner.bias, outer.weight), strict=True):
            near(a, t.grad.numpy())


def test_derivatives_of_second_order():
    for static in (False, True):
        x, w = Tensor(X, stop_gradient=False), Tensor(X + 1, stop_gradient=False)

        def step(x, w):
            y = recompute(lambda v: v * v * w, x).sum()
            (first,) = grad(y, x, create_graph=True)
            (first * first).sum().backward()

        (to_static(step) if static else step)(x, w)
        near(x.grad.numpy(), 8 * X * (X + 1) ** 2, terms=8)
        near(w.grad.numpy(), 8 * X**2 * (X + 1), terms=8)


def test_derivatives_inside_the_function():
    def slope(v):
        (found,) = grad((v**3).sum(), v, create_graph=True)
        return found

    x = Tensor(X, stop_gradient=False)
    recompute(slope, x).sum().backward()
    near(x.grad.numpy(), 6 * X, terms=8)


def test_a_captured_forward_differentiated_from_outside():
    layer = Linear(8, 8)
    forward = to_static(lambda v: recompute(lambda u: layer(u).tanh(), v))
    x = Tensor(X, stop_gradient=False)
    forward(x).sum().backward()
    got = x.grad.numpy(), layer.weight.grad.numpy()
    x.clear_grad(), layer.clear_gradients()
    layer(x).tanh().sum().backward()
    near(got[0], x.grad.numpy())
    near(got[1], layer.weight.grad.numpy())


def test_values_are_those_of_the_first_run():
    w, x = Tensor(X, stop_gradient=False), Tensor(X, stop_gradient=False)
    h = x * 1
    y = recompute(lambda v: v * w, h)
    with paddle.no_grad():
        w.set_value(X * 0)
        h.set_value(X * 0)
    y.sum().backward()
    near(x.grad.numpy(), X)
    assert not w.numpy().any(), "the second run leaves no value behind"


def test_autocast_is_that_of_the_first_run():
    layer, seen = Linear(8, 8), []

    def function(v):
        y = layer(v)
        seen.append(y.dtype)
        return y

    with paddle.amp.auto_cast(dtype="bfloat16"):
        y = recompute(function, Tensor(X, stop_gradient=False))
    y.astype("float32").sum().backward()
    assert seen[0] == seen[1] == "bfloat16"


def test_in_place_change_of_an_argument():
    x = Tensor(X, stop_gradient=False)
    h = x * 1

    def function(v):
        v.multiply_(v * 2)
        return v + 1

    y = recompute(function, h)
    (y + h).sum().backward()
    near(h.numpy(), 2 * X * X)
    near(x.grad.numpy(), 8 * X)


def test_saved_tensors_hooks_take_the_arguments():
    x = Tensor(X, stop_gradient=False)
    h, packed = x * 2, []
    with saved_tensors_hooks(lambda t: packed.append(t.shape) or t.numpy(), Tensor):
        y = recompute(lambda v: (v * v).tanh(), h)
    assert packed == [[4, 8]]
    y.sum().backward()
    assert x.grad is not None


def test_no_gradient_wanted_is_the_plain_call():
    y = recompute(lambda v: v * 2, Tensor(X))
    assert y.stop_gradient
    assert y._node is None
    with paddle.no_grad():
        assert recompute(lambda v: v * 2, Tensor(X, stop_gradient=False))._node is None


def test_a_pipeline_can_take_and_give_what_is_saved():
    x = Tensor(X, stop_gradient=False)
    y = recompute(lambda v: v * v, x * 1)
    node = y._node
    arrays = node.saved()
    assert [a.shape for a in arrays] == [(4, 8)]
    node.reload([a * 3 for a in arrays])
    y.sum().backward()
    near(x.grad.numpy(), 6 * X)


def test_a_second_backward_says_what_to_do():
    y = recompute(lambda v: v * v, Tensor(X, stop_gradient=False)).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(GradError, match=r"second time.*retain_graph"):
        y.backward()


def test_a_function_that_changes_its_mind():
    runs = []

    def function(v):
        runs.append(1)
        return v * 2 if len(runs) == 1 else (v * 2, v * 3)

    y = recompute(function, Tensor(X, stop_gradient=False))
    with pytest.raises(GradError, match=r"other results than the first time.*\[4, 8\] float32, \[4, 8\] float32"):
        y.sum().backward()


def test_a_function_that_keeps_a_tensor_of_its_first_run():
    cache = []

    def function(v):
        if not cache:
            cache.append(v * 3)
        return cache[0] * v

    y = recompute(function, Tensor(X, stop_gradient=False))
    with pytest.raises(GradError, match=r"used a Tensor computed earlier.*caches"):
        y.sum().backward()


def test_a_tensor_kept_in_an_attribute_still_has_its_gradient():
    x, products = Tensor(X, stop_gradient=False), []

    def function(v):
        products.append(v * 3)
        return v * v

    y = recompute(function, x * 1)
    (y + products[0]).sum().backward()
    near(x.grad.numpy(), 2 * X + 3)


def test_eager_code_stays_eager_inside():
    forward = to_static(lambda v: v * 2)

    def function(v):
        assert isinstance(v.sum().item(), float)
        return forward(v) if v.sum() < 100 else v

    x = Tensor(X, stop_gradient=False)
    recompute(function, x).sum().backward()
    near(x.grad.numpy(), np.full_like(X, 2))
    with pytest.raises(IndexError, match="99"):
        recompute(lambda w: paddle.nn.functional.embedding(Tensor(np.array([99])), w), x)


def test_an_error_in_the_second_run_leaves_state_as_it_was():
    w, runs = Tensor(X, stop_gradient=False), []

    def function(v):
        w2 = v * w
        runs.append(1)
        if len(runs) == 2:
            raise KeyError("second run")
        return w2

    y = recompute(function, Tensor(X))
    with paddle.no_grad():
        w.set_value(X + 1)
    with pytest.raises(KeyError, match="second run"):
        y.sum().backward()
    near(w.numpy(), X + 1)
    assert w.is_leaf


def test_a_hook_inside_captured_recompute_is_refused():
    def function(v):
        y = v * 2
        y.register_hook(lambda g: g)
        return y * y

    with pytest.raises(CaptureError, match="register_hook"):
        to_static(lambda v: recompute(function, v))(Tensor(X, stop_gradient=False))


# ---- the other public names ----


def test_sequential_recomputes_all_segments_but_the_last():
    runs = []
    layers = [Linear(8, 8) for _ in range(5)]
    for i, layer in enumerate(layers):
        layer.register_forward_post_hook(lambda *_, i=i: runs.append(i))
    x = Tensor(X, stop_gradient=False)
    y = recompute_sequential({"segments": 2}, Sequential(*layers), x)
    assert runs == [0, 1, 2, 3, 4]
    y.sum().backward()
    assert runs[5:] == [0, 1]
    got, x.grad = x.grad.numpy(), None
    Sequential(*layers)(x).sum().backward()
    near(got, x.grad.numpy())


def test_hybrid_offloads_and_partitions():
    x = Tensor(X, stop_gradient=False)
    ctx = {"mp_group": object(), "offload": True, "partition": True}
    with layout.using(Layout(Plan.from_degrees(mp=8))):
        y = recompute_hybrid(ctx, lambda v: v * v, x * 1)
        (held,) = y._node.inputs
        assert held.array.sharding.memory_kind == "pinned_host"
        assert held.array.sharding.shard_shape((4, 8)) == (4, 1)
        y.sum().backward()
        near(x.grad.numpy(), 2 * X)
        x.clear_grad()

        @to_static
        def step(v):
            recompute_hybrid({**ctx, "offload": False}, lambda u: u * u, v * 1).sum().backward()

        step(x)
    near(x.grad.numpy(), 2 * X)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: recompute(3), "first argument is 3"),
        (lambda: recompute(abs, 1, preserve_rng_state=2), "preserve_rng_state=2"),
        (lambda: recompute(abs, 1, use_reentrant=None), "use_reentrant=None"),
        (lambda: recompute_sequential({"segments": 3}, [abs, abs], 1), "segments=3 for 2 functions"),
        (lambda: recompute_sequential({"segment": 1}, [abs], 1), "unknown key 'segment'.*segments"),
        (lambda: recompute_sequential(None, [abs], 1), "ctx is None"),
        (lambda: recompute_hybrid({"offload": True}, abs, 1), "no 'mp_group'"),
        (lambda: GPTConfig.nano(recompute="ful"), "unknown recompute 'ful'.*full"),
        (lambda: LlamaConfig.nano(recompute="all"), "unknown recompute 'all'"),
        (lambda: chosen("half"), "unknown recompute 'half'"),
    ],
)
def test_refuses_what_it_cannot_do(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


# ---- models ----


@pytest.mark.slow
@pytest.mark.parametrize("what", ["full", "full_attn", "core_attn"])
def test_a_model_follows_the_plan_or_its_own_setting(what):
    paddle.seed(0)
    model = GPT(GPTConfig.nano(dropout=0.2, num_layers=1))
    tokens = Tensor(np.arange(16).reshape(2, 8))

    def run(own, plan):
        for layer in (model.blocks[0], model.blocks[0].attention):
            layer.recompute = own
        paddle.seed(1)
        with layout.using(None if plan is None else Layout(plan, jax.devices()[:1])):
            loss = model(tokens, labels=tokens)
        names = set()
        stack = [loss._node]
        while stack:
            node = stack.pop()
            names.add(node.name)
            stack += [e[0] for e in node.edges if isinstance(e, tuple)]
        model.clear_gradients()
        loss.backward()
        return loss.item(), [p.grad.numpy() for p in model.parameters()], any("recompute" in n for n in names)

    plain = run("", None)
    assert not plain[2]
    for found in (run(what, None), run("", Plan(recompute=what)), run("", Plan(recompute=what, offload=["act"]))):
        assert found[2]
        assert found[0] == plain[0]
        for a, b in zip(found[1], plain[1], strict=True):
            near(a, b)
    assert not run("none", Plan(recompute=what))[2]


def test_offload_of_activations_without_recompute_is_refused():
    with (
        layout.using(Layout(Plan(offload=["act"]), jax.devices()[:1])),
        pytest.raises(ConfigError, match="offload 'act'"),
    ):
        chosen("")


def test_a_share_of_the_blocks_recomputes():
    """Those that the plan says, the same numbers, and a model that does not say which block runs is refused."""
    paddle.seed(0)
    ids = np.arange(32).reshape(2, 16) % 50
    model = GPT(GPTConfig.nano(num_layers=4, hidden_size=32, num_heads=2, vocab_size=64, seq_len=16))
    gradients = []
    for plan in (Plan(), Plan(recompute="full", recompute_share=0.5)):
        with layout.using(Layout(plan, jax.devices()[:1])):
            model.clear_gradients()
            model(Tensor(ids), Tensor(ids)).backward()
            gradients.append([np.asarray(p.grad) for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        np.testing.assert_allclose(again, plain, atol=16 * EPS * np.abs(plain).max())  # another order of sums
    with layout.using(Layout(Plan(recompute="full", recompute_share=0.5), jax.devices()[:1])):
        with pytest.raises(ConfigError, match="does not say which of its blocks runs"):
            chosen("")
        modes = []
        for number in range(4):
            with in_block(number):
                modes.append(chosen("")[0])
    assert modes == ["none", "full", "none", "full"]
