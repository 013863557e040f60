"""Updates by kind of parameter: the bits of the whole update, few programs, and the whole one after a while."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyreme import optimizer as optimizers
from polyreme.eager.tensor import to_tensor
from polyreme.nn import ClipGradByGlobalNorm, ClipGradByNorm
from polyreme.nn.clip import GradientClip
from polyreme.nn.parameter import Parameter
from polyreme.optimizer import rule_update as base
from polyreme.optimizer import update_by_kind
from tests.compilations import counted_compilations

SHAPES = [(3, 2), (5,)] * 6
RNG = np.random.default_rng(0)
INITIAL = [RNG.normal(size=shape) for shape in SHAPES]
GRADS = [[RNG.normal(size=shape) for shape in SHAPES] for _ in range(5)]


class ClipBySum(GradientClip):
    """Looks at all gradients together in its own way."""

    def arrays(self, grads):
        return [g / sum(jnp.abs(other).sum() for other in grads) for g in grads]


def adamw(params, **more):
    fast = {"params": params[:2], "learning_rate": 2.0}
    return optimizers.AdamW(1e-2, parameters=[fast, {"params": params[2:]}], **more)


def updates(make, dtype="float32", steps=GRADS, skipped=()):
    """The parameters after these steps."""
    params = [Parameter(jnp.asarray(v, dtype), name=f"w{i}") for i, v in enumerate(INITIAL)]
    optimizer = make(params)
    for number, grads in enumerate(steps):
        for p, g in zip(params, grads, strict=True):
            p.grad = to_tensor(jnp.asarray(g, dtype))
        optimizer.step(skip=to_tensor(number in skipped) if skipped else None)
        for thread in threading.enumerate():
            if thread.name == "whole update":
                thread.join()
    return [p.numpy() for p in params], optimizer


CASES = {
    "momentum": (lambda params: optimizers.Momentum(1e-2, parameters=params, weight_decay=0.1), {}),
    "adamw, norm of all": (lambda params: adamw(params, grad_clip=ClipGradByGlobalNorm(0.5)), {"skipped": (1, 3)}),
    "masters, norm of each": (
        lambda params: adamw(params, grad_clip=ClipGradByNorm(0.5), multi_precision=True),
        {"dtype": "bfloat16"},
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES)
def test_gives_the_bits_of_the_whole_update_before_and_after_that_takes_over(case, monkeypatch):
    make, about = CASES[case]
    monkeypatch.setattr(update_by_kind, "STEPS_BY_KIND", 2)
    by_kind, optimizer = updates(make, **about)
    (update,) = optimizer._updates.values()
    assert isinstance(update, update_by_kind.UpdateByKind)
    assert update._compiler is not None
    monkeypatch.setattr(base, "is_worthwhile", lambda *_: False)
    whole, _ = updates(make, **about)
    for ours, theirs in zip(by_kind, whole, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_compiles_a_program_a_kind_then_the_whole_one_beside_the_steps(monkeypatch):
    monkeypatch.setattr(update_by_kind, "STEPS_BY_KIND", 2)
    make = CASES["momentum"][0]
    updates(make, steps=GRADS[:1])  # compiles what makes and fills Tensors too
    with counted_compilations() as programs:
        _, optimizer = updates(make, steps=GRADS[:1])
    assert len(programs) == len(set(SHAPES))
    (update,) = optimizer._updates.values()
    called = []
    whole = update._whole
    update._whole = lambda inputs: called.append(1) or whole(inputs)
    update._whole.lower = whole.lower
    params = optimizer._parameters
    with counted_compilations() as programs:
        for grads in GRADS[1:]:
            for p, g in zip(params, grads, strict=True):
                p.grad = to_tensor(jnp.asarray(g, "float32"))
            optimizer.step()
            if update._compiler is not None:
                update._compiler.join()
    assert len(programs) == 1  # the whole one, once, though another thread compiled it
    assert len(called) == 3


def is_worthwhile(values, clip=None, where=None):
    params = [Parameter(jax.device_put(jnp.asarray(v, "float32"), where)) for v in values]
    optimizer = optimizers.SGD(1e-2, parameters=params, grad_clip=clip)
    leaves = [optimizer._leaf(p, optimizer._options(p)) for p in params]
    return update_by_kind.is_worthwhile(leaves, [p._array for p in params])


def test_leaves_to_the_whole_update_what_gains_nothing_or_differs():
    assert is_worthwhile(INITIAL)
    assert is_worthwhile(INITIAL, ClipGradByGlobalNorm(1.0))
    assert not is_worthwhile(INITIAL[:9])
    assert not is_worthwhile(INITIAL, ClipBySum())
    over_devices = jax.sharding.NamedSharding(jax.make_mesh((2,), ("dp",)), jax.sharding.PartitionSpec())
    assert not is_worthwhile(INITIAL, where=over_devices)


def test_of_very_many_parameters_the_whole_is_never_compiled(monkeypatch):
    monkeypatch.setattr(update_by_kind, "STEPS_BY_KIND", 1)
    monkeypatch.setattr(update_by_kind, "MOST_IN_WHOLE", len(SHAPES) - 1)
    _, optimizer = updates(CASES["momentum"][0], steps=GRADS[:3])
    (update,) = optimizer._updates.values()
    assert update._compiler is None
