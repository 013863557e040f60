"""Parameters that lie on several meshes, as under a pipeline: every step as on one device, and the same checkpoints."""

import copy

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import polyreme.optimizer as opt
from polyreme.amp import GradScaler
from polyreme.core import state
from polyreme.eager.tensor import to_tensor
from polyreme.errors import CaptureError, ConfigError
from polyreme.jit import to_static
from polyreme.nn import clip
from polyreme.nn.parameter import Parameter
from polyreme.nn.utils import clip_grad_norm_

SHAPES = {"a": (4, 8), "b": (8,), "c": (8, 4), "d": (4,)}
STAGES = {"a": 0, "b": 0, "c": 1, "d": 1}
NAMES = list(SHAPES)
# a step's arithmetic is some ten float32 operations on numbers below 2, compiled in other groups, for each of 4 steps
TOLERANCE = 4 * 10 * 2 * 2.0**-24


def mesh(stage):
    return Mesh(np.asarray(jax.devices()[2 * stage : 2 * stage + 2]), ("sharding",))


def spread(params, stages, kind="device"):
    """The parameters on their stages' meshes, their optimizer state split and in this kind of memory."""
    for p in params:
        on = mesh(stages[p.name])
        p.layouts = {
            "param": NamedSharding(on, PartitionSpec()),
            "state": NamedSharding(on, PartitionSpec("sharding"), memory_kind=kind),
            "grad": NamedSharding(on, PartitionSpec("sharding")),
        }
        state.write(p, jax.device_put(p._array, p.layouts["param"]))


def parameters(stages=None, dtype="float32"):
    params = [
        Parameter(np.random.default_rng(i).normal(size=s), dtype, name=n) for i, (n, s) in enumerate(SHAPES.items())
    ]
    if stages is not None:
        spread(params, stages)
    return params


def give_gradients(params, step, scale=1.0, bad=None):
    for i, p in enumerate(params):
        value = np.random.default_rng(100 * step + i).normal(size=p.shape) * scale
        if p.name == bad:
            value[0] = np.inf
        g = to_tensor(value.astype("float32"))
        if p.layouts:
            state.write(g, jax.device_put(g._array, p.layouts["grad"]))
        p.grad = g


def one_clip(value):
    return lambda **given: opt.AdamW(0.01, grad_clip=clip.ClipGradByGlobalNorm(value), **given)


def two_clips(parameters, **given):
    """a and c clipped together, b by itself, d not at all."""
    a, b, c, d = parameters
    d.need_clip = False
    together = clip.ClipGradByGlobalNorm(0.5)
    groups = [{"params": [a, c, d]}, {"params": [b], "grad_clip": clip.ClipGradByNorm(0.3), "learning_rate": 0.5}]
    return opt.Momentum(0.1, parameters=groups, grad_clip=together, **given)


MAKERS = {
    "adamw": one_clip(1.0),
    "momentum": two_clips,
    "lamb": lambda **given: opt.Lamb(0.01, **given),
    "sgd": lambda **given: opt.SGD(0.1, weight_decay=0.1, **given),
}


def trained(make, stages, steps=range(4), optimizer=None, dtype="float32"):
    """Four steps: the rate is changed before the third, and the third is skipped."""
    if optimizer is None:
        optimizer = make(parameters=parameters(stages, dtype))
    for step in steps:
        give_gradients(sorted(optimizer._parameters, key=lambda p: p.name), step)
        if step == 2:
            optimizer.set_lr(optimizer.get_lr() / 2)
        optimizer.step(skip=to_tensor(step == 2))
        optimizer.clear_grad()
    return optimizer


def values(optimizer):
    return {p.name: p.numpy() for p in optimizer._parameters}


def check_equal(got, want, tolerance=TOLERANCE):
    assert list(got) == list(want)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.one_in(3)
@pytest.mark.slow_cases("lamb")
@pytest.mark.parametrize("name", MAKERS)
def test_every_step_is_as_on_one_device(name):
    make = MAKERS[name]
    alone, many = trained(make, None), trained(make, STAGES)
    start = {p.name: p.numpy() for p in parameters()}
    for n, value in values(alone).items():
        assert np.abs(value - start[n]).max() > 1000 * TOLERANCE
    check_equal(values(many), values(alone))
    for p in many._parameters:
        assert p._array.sharding == p.layouts["param"]
        for slot in many.slots:
            moment = many.state_dict()[f"{p.name}_{slot}_0"]._array
            assert moment.addressable_shards[0].data.shape[0] == p.shape[0] // 2


def test_state_in_host_memory():
    params = parameters()
    spread(params, STAGES, "pinned_host")
    moved = trained(MAKERS["adamw"], None, optimizer=MAKERS["adamw"](parameters=params))
    for name, value in values(trained(MAKERS["adamw"], STAGES)).items():
        np.testing.assert_array_equal(values(moved)[name], value)
    kinds = {t._array.sharding.memory_kind for held in moved._slots.values() for t in held.values()}
    assert kinds == {"pinned_host"}


def test_master_weights():
    make = lambda **given: opt.AdamW(0.01, multi_precision=True, grad_clip=clip.ClipGradByGlobalNorm(1.0), **given)
    alone, many = (trained(make, stages, dtype="bfloat16") for stages in (None, STAGES))
    for n in NAMES:
        masters = [o.state_dict()[f"{n}_master_0"].numpy() for o in (many, alone)]
        np.testing.assert_allclose(*masters, rtol=0, atol=TOLERANCE)
    check_equal(
        {p.name: p.astype("float32").numpy() for p in many._parameters},
        {p.name: p.astype("float32").numpy() for p in alone._parameters},
        2.0**-8 * 2,  # a master beside a boundary between two bfloat16 numbers may fall to either
    )


def test_the_norm_does_not_depend_on_the_grouping():
    """SGD at rate 1 of zeros gives back the clipped gradients, whatever stage holds what."""
    moves = []
    for stages in ((0, 0, 1, 1), (0, 1, 1, 2), (2, 1, 0, 3)):
        params = parameters(dict(zip(NAMES, stages, strict=True)))
        optimizer = opt.SGD(1.0, params, grad_clip=clip.ClipGradByGlobalNorm(0.5))
        for p in params:
            p.set_value(np.zeros(p.shape, "float32"))
        give_gradients(params, 0)
        optimizer.step()
        moves.append({p.name: -p.numpy() for p in params})
    for other in moves[1:]:
        for n in NAMES:
            np.testing.assert_array_equal(other[n], moves[0][n])
    norm = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in moves[0].values()))
    np.testing.assert_allclose(norm, 0.5, rtol=16 * 2.0**-24)


# state


def some_steps(optimizer, names, steps):
    """Only these parameters have gradients, so that numbers kept per parameter differ."""
    for step in steps:
        give_gradients(optimizer._parameters, step)
        for p in optimizer._parameters:
            if p.name not in names:
                p.grad = None
        optimizer.step()
        optimizer.clear_grad()


@pytest.mark.slow_cases("arrays-saved0-None", "arrays-saved2-restored2", "dict-saved2-restored2", "dict-saved0-None")
@pytest.mark.parametrize(("saved", "restored"), [(STAGES, None), (None, STAGES), (STAGES, dict.fromkeys(NAMES, 1))])
@pytest.mark.parametrize("how", ["arrays", "dict"])
def test_state_saved_under_one_grouping_continues_under_another(saved, restored, how):
    make = MAKERS["adamw"]
    first = make(parameters=parameters(saved))
    some_steps(first, NAMES, [0])
    some_steps(first, ["b", "c"], [1])
    second = make(parameters=parameters(restored))
    for p, q in zip(first._parameters, second._parameters, strict=True):
        q.set_value(p.numpy())
    by_name = lambda o: {id(p): f"model.{p.name}" for p in o._parameters}
    if how == "dict":
        second.set_state_dict(first.state_dict())
    else:
        second.create_state()
        target = second.state_arrays(by_name(second))
        given = first.state_arrays(by_name(first))
        assert {n: (a.shape, a.dtype) for n, a in target.items()} == {n: (a.shape, a.dtype) for n, a in given.items()}
        np.testing.assert_array_equal(given["step"], [1, 2, 2, 1])
        second.load_state_arrays(
            {n: jax.device_put(np.asarray(a), target[n].sharding) for n, a in given.items()}, by_name(second)
        )
    for optimizer in (first, second):
        some_steps(optimizer, NAMES, [2])
        assert [float(optimizer.state_dict()[f"{n}_step_0"]) for n in NAMES] == [2, 3, 3, 2]
    check_equal(values(second), values(first))


def test_parameters_moved_between_steps_take_their_numbers_along():
    make = MAKERS["adamw"]
    alone = trained(make, None)
    many = trained(make, {"a": 0, "b": 0, "c": 0, "d": 0}, steps=range(2))
    spread(many._parameters, STAGES)
    for held in many._slots.values():
        for p in many._parameters:
            state.write(held[id(p)], jax.device_put(held[id(p)]._array, p.layouts["state"]))
    check_equal(values(trained(make, None, steps=range(2, 4), optimizer=many)), values(alone))


def test_a_schedule_reaches_every_mesh_and_a_copy_stands_alone():
    rate = opt.lr.StepDecay(0.5, step_size=1, gamma=0.1)
    params = parameters(STAGES)
    optimizer = opt.SGD(rate, params)
    start = values(optimizer)
    model = copy.deepcopy((params, optimizer))[1]
    for expected in (0.5, 0.05):
        before = values(optimizer)
        for p in params:
            p.grad = to_tensor(np.ones(p.shape, "float32"))
        optimizer.step()
        check_equal(values(optimizer), {n: v - expected for n, v in before.items()}, 2.0**-22)
        rate.step()
    for copied, value in zip(model._parameters, start.values(), strict=True):
        np.testing.assert_array_equal(copied.numpy(), value)


# pieces, for a caller that compiles them


def test_captured_pieces_do_what_step_does():
    make = MAKERS["adamw"]
    alone = trained(make, None)
    many = make(parameters=parameters(STAGES))
    groups = many.groups_by_mesh()
    assert [[p.name for p in g.parameters] for g in groups] == [["a", "b"], ["c", "d"]]
    assert many.clips_together
    norms = [to_static(lambda group=group: many.squared_norms(group)) for group in groups]

    def update(skip, squares, group):
        many.update_group(group, skip, squares)
        for p in group.parameters:
            p.clear_grad(set_to_zero=False)

    updates = [to_static(lambda skip, squares, group=group: update(skip, squares, group)) for group in groups]
    for step in range(4):
        give_gradients(many._parameters, step)
        if step == 2:
            many.set_lr(many.get_lr() / 2)
        squares = [norm() for norm in norms]
        for p in many._parameters:
            want = (p.grad.numpy().astype("float64") ** 2).sum()
            found = [float(v.numpy()[NAMES.index(p.name)]) for v in squares]
            np.testing.assert_allclose(sum(found), want, rtol=32 * 2.0**-24)
            assert min(found) == 0.0
        for group, run in zip(groups, updates, strict=True):
            run(group.here(to_tensor(step == 2)), [group.here(v) for v in squares])
    check_equal(values(many), values(alone))
    assert [run.retraces for run in updates] == [["first call"]] * 2


def test_one_program_cannot_hold_a_step_over_several_meshes():
    optimizer = MAKERS["sgd"](parameters=parameters(STAGES))
    give_gradients(optimizer._parameters, 0)
    with pytest.raises(CaptureError, match=r"SGD.step\(\) in a captured function: its parameters lie on 2 meshes"):
        to_static(optimizer.step)()


class Halving(clip.GradientClip):
    def arrays(self, grads):
        return [g / 2 for g in grads]


def test_a_clip_that_needs_all_gradients_is_refused():
    optimizer = opt.SGD(1.0, parameters(STAGES), grad_clip=Halving())
    give_gradients(optimizer._parameters, 0)
    with pytest.raises(ConfigError, match=r"several meshes.*Halving clips all gradients together in its own way"):
        optimizer.step()
    optimizer = MAKERS["adamw"](parameters=parameters(STAGES))
    give_gradients(optimizer._parameters, 0)
    with pytest.raises(ConfigError, match=r"needs the norm of the gradients of all groups"):
        optimizer.update_group(optimizer.groups_by_mesh()[0])


# loss scaling and norms


def test_one_overflow_skips_the_step_on_every_mesh():
    def run(stages):
        optimizer = MAKERS["adamw"](parameters=parameters(stages))
        scaler = GradScaler(init_loss_scaling=8.0, incr_every_n_steps=2)
        scales, is_unchanged = [], []
        for step, bad in enumerate([None, "d", None, None]):
            give_gradients(optimizer._parameters, step, float(scaler.get_loss_scaling()), bad)
            before = values(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.clear_grad()
            scales.append(float(scaler.get_loss_scaling()))
            is_unchanged.append(all(np.array_equal(before[n], v) for n, v in values(optimizer).items()))
        return optimizer, scaler, scales, is_unchanged

    alone, _, want, _ = run(None)
    many, scaler, scales, kept = run(STAGES)
    assert scales == want == [8.0, 4.0, 4.0, 8.0]
    assert kept == [False, True, False, False]
    check_equal(values(many), values(alone))
    loss = to_tensor(np.float32(3.0))
    for stage in (0, 1):
        state.write(loss, jax.device_put(loss._array, NamedSharding(mesh(stage), PartitionSpec())))
        assert float(scaler.scale(loss)) == 24.0


def test_norms_and_clips_called_by_hand():
    params = parameters(STAGES)
    give_gradients(params, 0)
    grads = {p.name: p.grad.numpy() for p in params}
    norm = np.sqrt(sum((g.astype("float64") ** 2).sum() for g in grads.values()))
    rtol = 72 * 2.0**-24  # sums of 76 squares
    for p, g in clip.ClipGradByGlobalNorm(0.5)([(p, p.grad) for p in params]):
        np.testing.assert_allclose(g.numpy(), grads[p.name] * (0.5 / norm), rtol=rtol)
    give_gradients(params, 0)  # the clip wrote into them, as PaddlePaddle's does
    np.testing.assert_allclose(float(clip_grad_norm_(params, 0.5)), norm, rtol=rtol)
    for p in params:
        np.testing.assert_allclose(p.grad.numpy(), grads[p.name] * (0.5 / norm), rtol=rtol, atol=1e-6)
