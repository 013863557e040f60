"""A model trained on one device, and the same over pipeline stages; and what rounding may make of the difference."""

from types import SimpleNamespace

import jax
import numpy as np

import polyreme as paddle
from polyreme.core import layout as layouts
from polyreme.core import rng
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.distributed.placement import apply_plan, clear_plan
from polyreme.distributed.prove import Bound
from polyreme.jit import to_static
from polyreme.optimizer import Momentum
from polyreme.training.microbatches import cut

RATE = 0.1
DRAW = np.random.default_rng(0)
TOKENS = DRAW.integers(0, 16, (8, 7))
ROWS = DRAW.standard_normal((8, 4)).astype("float32")


def alone(build, inputs, steps):
    """Per step: the loss, gradients, weights and buffers after it, of the model's own loss on one device."""
    clear_plan()
    rng.seed(3)
    model = build()
    optimizer = Momentum(RATE, parameters=model.parameters())

    @to_static
    def gradients(*parts):
        loss = model(*parts) * (len(parts[0]) / len(inputs[0]))
        loss.backward()
        return loss

    rng.seed(4)
    records = []
    for count in steps:
        rows = len(inputs[0]) // count
        total = 0.0
        for i, key in enumerate(rng.default_generator.branches(count)):
            with rng.default_generator.starting_at(key):
                total += float(gradients(*[paddle.to_tensor(x[i * rows : (i + 1) * rows]) for x in inputs]))
        records.append(noted(model, optimizer, total))
    return records


def noted(model, optimizer, loss):
    grads = {n: np.asarray(p.grad._array) for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    optimizer.clear_grad()
    return loss, grads, {n: np.asarray(t._array) for n, t in model.state_dict().items()}


def in_stages(model, inputs, plan, at=None):
    """(chunks, Pipeline) of a model that gives its own loss."""
    devices = jax.devices()[: plan.mesh.size]
    rows = len(inputs[0]) // plan.num_microbatches
    with layouts.using(Layout(plan, devices).stages[0]):
        chunks = cut_into_stages(model, tuple(x[:rows] for x in inputs), len(plan.stage_of_chunk), at)
    return chunks, Pipeline(chunks, [lambda loss, _: loss], apply_plan(plan, model, devices, chunks))


def staged(build, inputs, steps, plan, at=None):
    """What `alone` gives, over the stages of a plan."""
    clear_plan()
    rng.seed(3)
    model = build()
    _, pipeline = in_stages(model, inputs, plan, at)
    return trained(model, pipeline, inputs, steps)


def trained(model, pipeline, inputs, steps):
    optimizer = Momentum(RATE, parameters=model.parameters())
    update = StagedUpdate(optimizer)
    rng.seed(4)
    records = []
    for count in steps:
        batch = cut([tuple(inputs), ()], count, None)
        losses = pipeline.train(batch, rng.default_generator.branches(count))
        loss = float(pipeline.mean(losses, batch))
        records.append(noted(model, SimpleNamespace(step=update.step, clear_grad=optimizer.clear_grad), loss))
    return records


def bound_of(weights, inputs):
    """prove's bounds for a model of these weights."""
    return Bound.of(weights, inputs)


def assert_same(ours, want, inputs):
    """As far as rounding explains: prove's bounds, which a step after the first passes on to the next."""
    bound = bound_of(want[-1][2], inputs)
    for step, ((loss, grads, after), (want_loss, want_grads, want_after)) in enumerate(zip(ours, want, strict=True), 1):
        assert abs(loss - want_loss) <= step * bound.loss(np.asarray(want_loss))
        assert grads.keys() == want_grads.keys()
        largest = max(map(bound.largest, want_grads.values()))
        for name, grad in want_grads.items():
            assert np.abs(grads[name] - grad).max() <= step * bound.gradient(grad, largest), name
        for name, value in want_after.items():
            # a weight moves by the rate times its gradient, a buffer is a mean over the batch
            moved = (
                RATE * bound.gradient(want_grads[name], largest) if name in want_grads else bound.gradient(value, 1.0)
            )
            assert np.abs(after[name] - value).max() <= 2 * step * moved + 2.0**-23 * bound.largest(value), name
