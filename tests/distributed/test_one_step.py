"""Every driver trains and evaluates with the one step: it hands its batch over, and has no forward, backward and update
of its own.

What the step computes under which plan and schedule is proved once, by test_prove and the pipeline's own tests.
"""

import jax
import numpy as np
import pytest

import polyreme as paddle
from polyreme import nn
from polyreme.distributed import fleet
from polyreme.distributed.pipeline.pipeline_layer import PipelineLayer
from polyreme.distributed.pipeline.step import PipelineStep
from polyreme.distributed.placement import clear_plan
from polyreme.distributed.prove import prove
from polyreme.mesh import Plan
from polyreme.optimizer import SGD
from polyreme.recipes.planning import proving
from polyreme.recipes.planning.verify import verify
from polyreme.recipes.training.trainer import Trainer
from polyreme.training import TrainingStep
from tests.recipes.tiny_run import ONE_DEVICE, load

X, Y = np.ones((8, 2), np.float32), np.zeros((8, 2), np.float32)
TOKENS = np.ones((8, 16), np.int64)
STAGES = [*ONE_DEVICE, "model.num_layers=2", "plan.pp=2", "train.accumulation=2"]


@pytest.fixture(autouse=True)
def _one_device_afterwards():
    yield
    fleet.reset()
    clear_plan()


def sgd(model):
    return SGD(0.1, parameters=model.parameters())


def layers():
    return PipelineLayer([nn.Linear(2, 2), nn.Linear(2, 2)], num_stages=2, loss_fn=nn.MSELoss())


def make_trainer(folder, overrides=STAGES):
    config = load(folder / "run", *overrides).config
    return Trainer(config, jax.devices()[: config.plan.num_devices])


def trainer(folder, overrides=STAGES):
    make_trainer(folder, overrides).step(TOKENS, TOKENS)


def trainer_evaluates(folder, overrides=STAGES):
    make_trainer(folder, overrides).evaluate(TOKENS, TOKENS)


def whole_trainer_evaluates(folder):
    trainer_evaluates(folder, ONE_DEVICE)


def trainer_gives_logits(folder):
    make_trainer(folder).logits(TOKENS)


def whole_trainer_gives_logits(folder):
    make_trainer(folder, ONE_DEVICE).planned.outputs(TOKENS)


def whole_trainer(folder):
    trainer(folder, ONE_DEVICE)


def command(folder, overrides=STAGES):
    proving.run(load(folder / "run", *overrides).config, steps=1)


def whole_command(folder):
    command(folder, ONE_DEVICE)


def verified(folder):
    config = load(folder / "run", *ONE_DEVICE).config
    verify(config, config.parallel_plan)


def make_model():
    network = nn.Linear(2, 2)
    high_level = paddle.Model(network)
    high_level.prepare(sgd(network), nn.MSELoss())
    return high_level


def model(folder):
    make_model().train_batch([X], [Y])


def model_evaluates(folder):
    make_model().eval_batch([X], [Y])


def model_predicts(folder):
    make_model().predict_batch([X])


def make_engine(strategy=None):
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    return paddle.distributed.to_static(network, None, nn.MSELoss(), sgd(network), strategy)


def engine(folder, strategy=None):
    make_engine(strategy)(paddle.to_tensor(X), paddle.to_tensor(Y))


def in_stages():
    return paddle.distributed.Strategy({"pipeline": {"enable": True, "pp_degree": 2, "accumulate_steps": 2}})


def staged_engine(folder):
    engine(folder, in_stages())


def engine_evaluates(folder, strategy=None):
    engine = make_engine(strategy)
    engine.eval()
    engine(paddle.to_tensor(X), paddle.to_tensor(Y))


def engine_predicts(folder, strategy=None):
    engine = make_engine(strategy)
    engine.predict()
    engine(paddle.to_tensor(X))


def staged_engine_evaluates(folder):
    engine_evaluates(folder, in_stages())


def staged_engine_predicts(folder):
    engine_predicts(folder, in_stages())


def staged_prove(folder):
    plan = Plan.from_degrees(pp=2, num_microbatches=2)
    prove(layers, plan, [(X, Y)], optimizer=sgd, devices=jax.devices()[:2])


def make_fleet_model():
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {"pp_degree": 2, "dp_degree": 4}
    strategy.pipeline_configs = {"accumulate_steps": 2, "micro_batch_size": 1}
    fleet.init(is_collective=True, strategy=strategy)
    network = layers()
    return fleet.distributed_model(network), fleet.distributed_optimizer(sgd(network))


def fleet_batch(folder):
    model, optimizer = make_fleet_model()
    model.train_batch([X, Y], optimizer)


def fleet_evaluates(folder):
    make_fleet_model()[0].eval_batch([X, Y], compute_loss=True)


class Reached(Exception):
    """Raised in place of the rest of a step."""


WHOLE = [whole_trainer, whole_command, verified, model, engine]
STAGED = [trainer, command, staged_prove, staged_engine, fleet_batch]
WHOLE_EVALUATING = [
    whole_trainer_evaluates,
    whole_trainer_gives_logits,
    model_evaluates,
    model_predicts,
    engine_evaluates,
    engine_predicts,
]
STAGED_EVALUATING = [
    trainer_evaluates,
    trainer_gives_logits,
    staged_engine_evaluates,
    staged_engine_predicts,
    fleet_evaluates,
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("half", ["gradients", "update"])
@pytest.mark.parametrize(
    ("driver", "step"),
    [*((d, TrainingStep) for d in WHOLE), *((d, PipelineStep) for d in STAGED)],
    ids=lambda value: value.__name__,
)
def test_a_driver_hands_its_batch_to_the_step(driver, step, half, monkeypatch, tmp_path):
    def reached(*args, **kwargs):
        raise Reached

    def nothing(self, batch, **kwargs):
        zero = paddle.zeros([])
        return zero, [([zero], None) for _ in batch]

    for each in (TrainingStep, PipelineStep):
        monkeypatch.setattr(each, "gradients", nothing)
    monkeypatch.setattr(step, half, reached)
    with pytest.raises(Reached):
        driver(tmp_path)


@pytest.mark.parametrize(
    ("driver", "step"),
    [*((d, TrainingStep) for d in WHOLE_EVALUATING), *((d, PipelineStep) for d in STAGED_EVALUATING)],
    ids=lambda value: value.__name__,
)
def test_evaluation_is_the_step_s(driver, step, monkeypatch, tmp_path):
    def reached(*args, **kwargs):
        raise Reached

    monkeypatch.setattr(step, "evaluate", reached)
    with pytest.raises(Reached):
        driver(tmp_path)
