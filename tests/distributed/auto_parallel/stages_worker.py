"""Training steps of a plain GPT over stages; prints a line of JSON. Run alone, or by each process of a job."""

import json
import sys

import numpy as np

import polyreme as paddle
from polyreme import distributed as dist
from polyreme.core import layout as layouts
from polyreme.core import rng
from polyreme.core.layout import Layout
from polyreme.distributed.auto_parallel.stages.chunks import cut_into_stages
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.distributed.placement import apply_plan
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.optimizer import Momentum
from polyreme.training.microbatches import cut

DATA = np.random.default_rng(0).integers(0, 128, (2, 8, 9))


def train(plan, devices=None):
    """Losses of two steps with dropout, and one of evaluation."""
    paddle.seed(5)
    model = GPT(GPTConfig.nano(dropout=0.1))
    rows = len(DATA[0]) // plan.num_microbatches
    with layouts.using(Layout(plan, devices).stages[0]):
        example = DATA[0, :rows]
        chunks = cut_into_stages(model, (example[:, :-1], example[:, 1:]), len(plan.stage_of_chunk))
    pipe = Pipeline(chunks, [lambda loss, _: loss], apply_plan(plan, model, devices, chunks))
    update = StagedUpdate(Momentum(0.1, parameters=model.parameters()))
    paddle.seed(9)
    losses = []
    for data in (*DATA, None):
        if data is None:
            model.eval()
        data = DATA[0] if data is None else data
        batch = cut([(data[:, :-1], data[:, 1:]), ()], plan.num_microbatches, None)
        keys = rng.default_generator.branches(len(batch))
        if model.training:
            parts = pipe.train(batch, keys)
            update.step()
        else:
            parts = [loss for ([loss], _) in pipe.evaluate(batch, keys)]
        losses.append(float(pipe.mean(parts, batch)))
    return losses


if __name__ == "__main__":
    dist.init_parallel_env()
    print("RESULT", json.dumps(train(Plan.from_dict(json.loads(sys.argv[1])))), flush=True)  # noqa: T201  (the test reads it)
