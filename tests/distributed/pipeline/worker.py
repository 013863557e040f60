"""A few training steps of a tiny GPT under a plan; prints a line of JSON. Run alone, or by each process of a job."""

import json
import sys

import numpy as np

import polyreme as paddle
from polyreme import distributed as dist
from polyreme.amp import GradScaler
from polyreme.core import rng
from polyreme.distributed.pipeline.chunks import in_chunks
from polyreme.distributed.pipeline.runtime import Pipeline
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.pipeline.update import StagedUpdate
from polyreme.distributed.placement import apply_plan
from polyreme.mesh import Plan
from polyreme.models.decoders.gpt import GPT, GPTConfig
from polyreme.nn.clip import ClipGradByGlobalNorm
from polyreme.optimizer import AdamW
from polyreme.training import StepPolicy, cut

DATA = np.random.default_rng(0).integers(0, 128, (2, 8, 17))


def train(plan, devices=None):
    """Losses and gradient norms of two steps with dropout and clipping, the losses of two scaled ones of which the
    first overflows and of one with the shared embedding frozen, a validation loss and the counters."""
    paddle.seed(5)
    model = GPT(GPTConfig.nano(num_layers=4, dropout=0.1))
    chunks = in_chunks(model, plan)
    layout = apply_plan(plan, model, devices, chunks.get_model_chunks())
    optimizer = AdamW(1e-2, parameters=model.parameters(), grad_clip=ClipGradByGlobalNorm(0.5))
    optimizer.create_state()
    pipe = Pipeline(chunks.get_model_chunks(), [model.pipeline_loss], layout, model.pipeline_output)
    update = StagedUpdate(optimizer)
    paddle.seed(9)
    losses, norms = [], []
    for rows in DATA:
        batch = cut([rows[:, :-1], rows[:, 1:]], plan.num_microbatches, None)
        step_losses = pipe.train(batch, rng.default_generator.branches(len(batch)))
        losses.append(float(pipe.mean(step_losses, batch)))
        squares = update.squares()
        norms.append(float(np.sqrt(sum(np.asarray(s.numpy(), np.float64).sum() for s in squares))))
        update.step(squares)
    for scaler in (GradScaler(init_loss_scaling=2.0**127), GradScaler(init_loss_scaling=2.0**10)):
        scale = scaler.get_loss_scaling()._array
        step_losses = pipe.train(batch, rng.default_generator.branches(len(batch)), scale=scale)
        update.unscale(scaler)
        scaler.step(update)
        scaler.update()
        losses.append(float(pipe.mean(step_losses, batch)))
    model.tokens.weight.stop_gradient = True  # fewer gradients between stages than before
    step_losses = pipe.train(batch, rng.default_generator.branches(len(batch)))
    losses.append(float(pipe.mean(step_losses, batch)))
    optimizer.clear_grad()
    model.eval()
    step, key = PipelineStep(pipe, StepPolicy(), optimizer), rng.default_generator.get_state()
    step_losses = [loss._array for ([loss], _) in step.evaluate(batch)]
    [(_, logits)] = step.evaluate(cut([DATA[0, :2, :-1], None], 1, None), losses=False, outputs=True)
    assert (rng.default_generator.get_state() == key).all()  # nothing was drawn, whichever stage a process has
    update.share_numbers()
    names = {id(p): n for n, p in model.named_parameters()}
    counters = {n: np.asarray(a).tolist() for n, a in optimizer.state_arrays(names).items() if "/" not in n}
    return {
        "losses": losses,
        "norms": norms,
        "validation": float(pipe.mean(step_losses, batch)),
        "logits": np.asarray(pipe.in_every_process(logits))[0, -1, :4].tolist(),
        "counters": counters,
    }


if __name__ == "__main__":
    dist.init_parallel_env()
    result = train(Plan.from_dict(json.loads(sys.argv[1])))
    print("RESULT", json.dumps(result), flush=True)  # noqa: T201  (what the test reads)
