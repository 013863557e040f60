"""The trainer: accumulation and validation; mixed precision; what it refuses."""

import jax
import numpy as np
import pytest

from polyreme.core import rng
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import Tensor
from polyreme.errors import ConfigError
from polyreme.recipes.training.trainer import Trainer
from tests.recipes.tiny_run import ONE_DEVICE, load

# float32 sums of up to 512 terms taken in another order, over three steps
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.fixture
def make(tmp_path):
    def make_trainer(*overrides, devices=8):
        return Trainer(load(tmp_path / "run", *overrides).config, jax.devices()[:devices])

    return make_trainer


def batches(count, size=8):
    tokens = np.random.default_rng(0).integers(0, 512, (count, size, 17)).astype(np.int32)
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def losses(trainer, count=3):
    return [float(trainer.step(*batch).loss) for batch in batches(count)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of a trainer without dropout: the loss of the first batch before any step; loss and norm of four steps."""
    trainer = Trainer(load(tmp_path_factory.mktemp("plain") / "run", "model.dropout=0").config, jax.devices())
    before = trainer.evaluate(*batches(1)[0])
    steps = [trainer.step(*batch) for batch in batches(4)]
    clear_plan()
    return before, [(float(step.loss), float(step.grad_norm)) for step in steps]


@pytest.mark.slow
def test_accumulation_gives_the_same_steps(make, plain):
    # without dropout, which draws other numbers for other shapes
    parts = make("model.dropout=0", "train.accumulation=2")
    steps = [parts.step(*batch) for batch in batches(3)]
    np.testing.assert_allclose([(float(s.loss), float(s.grad_norm)) for s in steps], plain[1][:3], rtol=CLOSE)


def test_evaluation_is_without_dropout_and_draws_nothing(make, plain):
    trainer = make()
    assert trainer.config.model.dropout > 0
    tokens, labels = batches(1)[0]
    key = rng.default_generator.get_state()
    first = trainer.evaluate(tokens, labels)
    assert trainer.evaluate(tokens, labels) == first
    np.testing.assert_array_equal(rng.default_generator.get_state(), key)
    assert trainer.model.training
    assert plain[0] == pytest.approx(first, rel=CLOSE)
    assert float(trainer.step(tokens, labels).loss) != first


@pytest.mark.slow
@pytest.mark.parametrize("level", [pytest.param("O1", marks=pytest.mark.slow), "O2"])
def test_bfloat16(make, plain, level):
    expected = [loss for loss, _ in plain[1]]
    trainer = make("model.dropout=0", f"train.amp_level={level}")
    got = losses(trainer, 4)
    # bfloat16 keeps 8 bits: each logit is off by up to 2^-8 of its size, and their mean far less
    assert got == pytest.approx(expected, rel=2**-8)
    assert got != expected
    dtypes = {p.dtype.name for p in trainer.model.parameters()}
    masters = [a for name, a in trainer.arrays().items() if name.startswith("optimizer/master/")]
    if level == "O1":
        assert dtypes == {"float32"}
        assert not masters
    else:
        assert dtypes == {"bfloat16"}
        assert len(masters) == len(list(trainer.model.parameters()))
        assert all(a.dtype == np.float32 for a in masters)


def test_first_bad_tensor_is_named(make):
    trainer = make()
    tokens, labels = batches(1)[0]
    key = trainer.step(tokens, labels).key
    assert trainer.first_bad_tensor(tokens, labels, key) is None
    weight = trainer.model.blocks[0].ffn_norm.weight
    weight.set_value(np.full(32, 3e38, np.float32))
    result = trainer.step(tokens, labels)
    assert not np.isfinite(float(result.grad_norm))
    assert trainer.first_bad_tensor(tokens, labels, result.key) == "output of blocks.0.ffn_norm"


def test_nothing_changes_after_a_step_that_is_not_finite(make):
    trainer = make()
    (tokens, labels), other = batches(2)
    trainer.step(tokens, labels)
    weight = trainer.model.blocks[0].ffn_norm.weight
    good = weight.numpy()
    weight.set_value(np.full(32, np.nan, np.float32))
    trainer.step(tokens, labels)
    weight.set_value(good)
    before = {name: np.array(array) for name, array in trainer.arrays().items() if name != "rng"}
    assert np.isfinite(float(trainer.step(*other).loss))
    for name, array in trainer.arrays().items():
        if name != "rng":
            np.testing.assert_array_equal(array, before[name], err_msg=name)


# that stages draw the random numbers of one program: tests/distributed, test_runtime and auto_parallel/test_engine
TWO_LAYERS = ("model.num_layers=2", "model.dropout=0")
STAGED = (
    *TWO_LAYERS,
    "train.accumulation=2",
    "plan.pp=2",
    "plan.mp=2",
    "plan.sharding=2",
    "plan.dp=1",
    "plan.schedule=ZBH1",
)


@pytest.mark.slow
def test_over_pipeline_stages_a_run_is_the_same_and_its_checkpoint_fits_one_device(make):
    staged = make(*STAGED)
    found = losses(staged)
    alone = make(*ONE_DEVICE, *TWO_LAYERS, devices=1)
    assert found == pytest.approx(losses(alone), rel=CLOSE)
    tokens, labels = batches(1)[0]
    assert staged.evaluate(tokens, labels) == pytest.approx(alone.evaluate(tokens, labels), rel=CLOSE)
    saved = {name: np.asarray(array) for name, array in staged.arrays().items()}
    target = alone.target()
    assert {name: a.shape for name, a in saved.items()} == {name: t.shape for name, t in target.items()}
    alone.load({name: jax.device_put(a, target[name].sharding) for name, a in saved.items()}, 3)
    for name, array in alone.arrays().items():
        np.testing.assert_array_equal(array, saved[name], err_msg=name)
    staged.model.eval()
    (logits,) = staged.logits(tokens[:1])
    alone.model.eval()
    np.testing.assert_allclose(logits, alone.model(Tensor(jax.numpy.asarray(tokens[:1]))).numpy()[0], atol=CLOSE)


def test_over_pipeline_stages_a_bad_step_changes_nothing_and_is_named(make):
    trainer = make(*STAGED)
    tokens, labels = batches(1)[0]
    key = trainer.step(tokens, labels).key
    assert trainer.first_bad_tensor(tokens, labels, key) is None
    trainer.model.blocks[0].ffn_norm.weight.set_value(np.full(32, 3e38, np.float32))
    before = {name: np.array(array) for name, array in trainer.arrays().items() if name != "rng"}
    result = trainer.step(tokens, labels)
    assert not np.isfinite(float(result.grad_norm))
    for name, array in before.items():
        np.testing.assert_array_equal(trainer.arrays()[name], array, err_msg=name)
    assert trainer.first_bad_tensor(tokens, labels, result.key) == "output of blocks.0 of microbatch 0"


@pytest.mark.slow_cases("offloaded")
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("plan.compile=blocks",), id="blocks"),
        pytest.param(("plan.offload={param: disk, state: disk}", "plan.offload_path=away"), id="offloaded"),
    ],
)
def test_in_parts_the_block_of_a_bad_step_is_named(make, settings):
    trainer = make(*ONE_DEVICE, *TWO_LAYERS, *settings, devices=1)
    tokens, labels = batches(1)[0]
    key = trainer.step(tokens, labels).key
    assert trainer.first_bad_tensor(tokens, labels, key) is None
    trainer.model.blocks[0].ffn_norm.weight.set_value(np.full(32, 3e38, np.float32))
    result = trainer.step(tokens, labels)
    assert trainer.first_bad_tensor(tokens, labels, result.key) == "output of blocks.0 of microbatch 0"
    trainer.model.blocks[1].ffn_norm.weight.set_value(np.full(32, np.nan, np.float32))
    assert trainer.first_bad_tensor(tokens, labels, key) == "parameter blocks.1.ffn_norm.weight"


def test_what_is_not_available_is_refused(make):
    with pytest.raises(ConfigError, match="float16 needs loss scaling"):
        make("train.amp_level=O1", "train.amp_dtype=float16")


@pytest.mark.slow
def test_the_load_of_experts_is_that_of_a_step(make):
    model = ["model.family=mixtral", "model.num_layers=1", "model.dropout=0", "model.capacity_factor=0.5"]
    trainer = make(*ONE_DEVICE, *model, "log.experts=true", "train.accumulation=2", devices=1)
    assert trainer.expert_loads() == {"load/blocks.0.ffn": 0, "dropped/blocks.0.ffn": 0}
    for _ in range(2):
        trainer.step(*batches(1)[0])
        # two choices of each of 8 x 16 tokens; of a microbatch's 128 an expert takes at most 0.5 / 8
        load = trainer.model.blocks[0].ffn.router.last_load.numpy()
        assert load.sum() == 256
        loads = trainer.expert_loads()
        assert loads["load/blocks.0.ffn"] == load.max() / 32 > 1
        assert 128 <= loads["dropped/blocks.0.ffn"] < 256 - 8
