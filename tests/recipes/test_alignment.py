"""Stages that align a model: known first losses, gradients that are there, the same on every plan, resumed exactly."""

import json
import math

import jax
import numpy as np
import pytest

from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.eager.tensor import to_tensor
from polyreme.errors import ConfigError, DataError
from polyreme.io import safetensors_file
from polyreme.recipes.data.batches import Numbered, gather
from polyreme.recipes.stages import STAGES
from polyreme.recipes.training.alignment import answer_log_probs, read_scores, rewards
from polyreme.recipes.training.logs import read_jsonl
from polyreme.recipes.training.trainer import Trainer, told
from polyreme.recipes.weights.base import load_trained, make_model
from polyreme.recipes.weights.merge import merge
from tests.recipes.tiny_run import ONE_DEVICE, history, saved
from tests.recipes.tiny_tune import load, train, write_base

WORDS = ["God", "heaven", "earth", "and", "the", "beginning"]
# float32 sums of up to 512 terms taken in another order, over three steps
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "llama")


def write_rows(folder, kind, count=40):
    """Preferences, or answers that were judged."""
    rows = []
    for number in range(count):
        prompt, good, bad = (WORDS[(number + i) % 6] for i in (0, 1, 3))
        better, worse = " ".join([good] * (number % 4 + 1)), " ".join([bad] * (number % 3 + 1))
        if kind == "judgements":
            rows.append({"prompt": prompt, "completion": better if number % 2 else worse, "label": bool(number % 2)})
        else:
            rows.append({"prompt": prompt, "chosen": better, "rejected": worse})
    path = folder / f"{kind}.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def settings_of(folder, stage, base):
    kind = STAGES[stage].samples.name
    rows = [] if kind == "conversations" else [f"data.train={write_rows(folder, kind)}"]
    return [f"stage={stage}", *rows, *([f"teacher={base}"] if stage == "distill" else [])]


def three_steps(folder, base, stage, *overrides, devices):
    """[(loss, gradient norm, what the loss tells), ...] of three steps, and the trained parameters after them."""
    loaded = load(folder / "run", base, *settings_of(folder, stage, base), *overrides)
    config = loaded.config
    trainer, data = Trainer(config, jax.devices()[:devices]), config.samples.load.load()(config, loaded.folder)
    if config.record.prepare is not None:
        (folder / "run").mkdir(exist_ok=True)
        config.record.prepare.load()(config, trainer, data, folder / "run")
    samples, results = Numbered(data.train), []
    for step in range(3):
        batch = gather(samples, range(4 * step, 4 * step + 4))
        config.samples.check.load()(batch, config.dimensions, "a step")
        result = trainer.step(batch.inputs, batch.labels)
        results.append((float(result.loss), float(result.grad_norm), told(result)))
    trained = {name: p.numpy() for name, p in trainer.model.named_parameters() if p.trainable}
    clear_plan()
    return results, trained


FIRST = {
    # neither model nor reference prefers an answer
    "dpo": lambda loss, _: loss == pytest.approx(math.log(2), abs=1e-6),
    "kto": lambda loss, _: loss == pytest.approx(0.5, abs=1e-6),
    # two texts of random states have about the same reward
    "rm": lambda loss, _: 0.3 < loss < 1.5,
    # the teacher is the student
    "distill": lambda loss, told: told["loss/soft"] == pytest.approx(0, abs=1e-5) and loss > 1,
}


PIPELINE = ("plan.pp=2", "plan.dp=2", "plan.sharding=1", "plan.sharding_stage=0", "plan.mp=1")
# with each stage's adapters or all weights, and schedules of one chunk and of two
OVER_STAGES = [
    pytest.param("dpo", ["plan.schedule=ZBH1"], id="dpo"),
    pytest.param("kto", ["plan.schedule=ZBVPP", "plan.virtual_stages=2"], marks=pytest.mark.slow, id="kto"),
    pytest.param("rm", ["fine_tuning=full", "lora_rank=8"], marks=pytest.mark.slow, id="rm"),
    pytest.param("distill", ["plan.mp=2"], marks=pytest.mark.slow, id="distill"),
]


def assert_same_steps(one, other):
    (steps, alone), (others, shared) = one, other
    for a, b in zip(steps, others, strict=True):
        assert a[:2] == pytest.approx(b[:2], rel=1e-3, abs=CLOSE)
        assert a[2] == pytest.approx(b[2], rel=1e-3, abs=1e-4)
    assert alone.keys() == shared.keys()
    for name in alone:  # AdamW's first steps are of the size of the rate whatever the gradient's
        np.testing.assert_allclose(alone[name], shared[name], atol=3e-3, rtol=1e-3, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("stage", FIRST)
def test_the_first_loss_is_known_and_every_plan_trains_the_same(tmp_path, base, stage):
    one = three_steps(tmp_path, base, stage, *ONE_DEVICE, devices=1)
    assert FIRST[stage](one[0][0][0], one[0][0][2])
    assert one[0][0][1] > 1e-3
    assert_same_steps(one, three_steps(tmp_path, base, stage, devices=8))


@pytest.mark.parametrize(("stage", "settings"), OVER_STAGES)
def test_pipeline_stages_train_the_same(tmp_path, base, stage, settings):
    # kto judges by the other answers of a microbatch
    tuned = ["train.accumulation=2", *(text for text in settings if not text.startswith("plan."))]
    one = three_steps(tmp_path, base, stage, *ONE_DEVICE, *tuned, devices=1)
    devices = 8 if "plan.mp=2" in settings else 4
    (tmp_path / "run" / "reference.safetensors").unlink(missing_ok=True)  # scored over stages too
    assert_same_steps(
        one, three_steps(tmp_path, base, stage, *PIPELINE, "train.accumulation=2", *settings, devices=devices)
    )


def test_a_preference_run_learns_and_goes_on_to_the_same_bits(tmp_path, base):
    settings = [*settings_of(tmp_path, "dpo", base), "beta=0.5", "train.learning_rate=3e-2"]
    train(tmp_path / "whole", base, *settings)
    records = history(tmp_path / "whole")
    assert records[0][1] == pytest.approx(math.log(2), abs=1e-6)
    assert records[0][3] > 1e-3
    assert records[-1][1] < 0.6
    last = [row for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl") if row["kind"] == "train"][-1]
    assert last["rewards/chosen"] > last["rewards/rejected"]
    clear_plan()
    train(tmp_path / "whole", base, *settings, resume="3")
    assert history(tmp_path / "whole") == records
    assert read_scores(tmp_path / "whole" / "reference.safetensors", "of other pairs") is None
    # what no step reads is not computed, until the run goes on
    known = reference_of(tmp_path / "whole")
    assert len(known) == 32
    assert (~np.isnan(known).any(1)).sum() == 24
    clear_plan()
    train(tmp_path / "whole", base, *settings, "train.steps=8")
    more = reference_of(tmp_path / "whole")
    assert not np.isnan(more).any()
    np.testing.assert_array_equal(more[~np.isnan(known)], known[~np.isnan(known)])


def reference_of(folder):
    """What the reference says of the training pairs, [pairs, 2]."""
    with (folder / "reference.safetensors").open("rb") as file:
        return safetensors_file.read(file, "reference")[0]["0"]


@pytest.mark.slow
@pytest.mark.parametrize("loss_type", ["simpo", "ipo"])
def test_other_losses_of_preferences(tmp_path, base, loss_type):
    results, _ = three_steps(
        tmp_path, base, "dpo", *ONE_DEVICE, f"loss_type={loss_type}", "sft_loss_ratio=0.5", devices=1
    )
    assert all(math.isfinite(loss) and norm > 1e-3 for loss, norm, _ in results)
    assert (tmp_path / "run" / "reference.safetensors").exists() == (loss_type == "ipo")


def test_log_probabilities_and_rewards_are_those_of_the_labelled_tokens(tmp_path, base):
    model = make_model(load(tmp_path / "run", base, *settings_of(tmp_path, "rm", base)).config)
    model.eval()
    tokens = np.array([[5, 6, 7, 0], [5, 6, 8, 9]])
    labels = np.array([[-100, 7, -100, -100], [-100, 8, 9, -100]])
    hidden, weight = model.hidden(to_tensor(tokens)).numpy(), model.reward_head.weight.numpy()
    got = rewards(model, to_tensor(tokens), to_tensor(labels)).numpy()
    np.testing.assert_allclose(got, [hidden[0, 1] @ weight, hidden[1, 2] @ weight], rtol=1e-5, atol=1e-6)
    sums, counts = answer_log_probs(model, to_tensor(tokens[None]), to_tensor(labels[None]))
    logits = model(to_tensor(tokens)).numpy().astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(sums.numpy(), [[logs[0, 1, 7], logs[1, 1, 8] + logs[1, 2, 9]]], rtol=1e-5)
    assert counts.numpy().tolist() == [[1, 2]]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["fine_tuning=full", "lora_rank=8"]])
def test_a_reward_model_is_read_back(tmp_path, base, more):
    train(tmp_path / "run", base, *settings_of(tmp_path, "rm", base), *more, "train.steps=3")
    arrays, _ = saved(tmp_path / "run")
    clear_plan()
    model, _ = load_trained(tmp_path / "run")
    np.testing.assert_array_equal(model.reward_head.weight.numpy(), arrays["model/reward_head.weight"])
    with pytest.raises(ConfigError, match="stage rm trained parameters that published weights do not have"):
        merge(tmp_path / "run", tmp_path / "merged", say=print)


@pytest.mark.parametrize(
    ("overrides", "error", "told"),
    [
        (["stage=dpo"], DataError, "a row of kind answers; stage dpo needs rows with chosen and rejected"),
        (["stage=kto", "desirable_weight=0"], ConfigError, "desirable_weight"),
        (["beta=0.2"], ConfigError, "beta=0.2 with stage=sft, which has no use for it; leave it out, or set stage=dpo"),
        (
            ["stage=dpo", "dpop_lambda=3"],
            ConfigError,
            "dpop_lambda=3.0 with loss_type=sigmoid, which has no use for it",
        ),
        (["stage=distill"], ConfigError, "stage=distill: teacher is missing"),
        (["stage=dop"], ConfigError, "dop"),
        (["stage=dpo", "loss_type=sigmoidal"], ConfigError, "did you mean 'sigmoid'"),
    ],
)
def test_settings_that_a_stage_cannot_use(tmp_path, base, overrides, error, told):
    def prepare():
        loaded = load(tmp_path / "run", base, *ONE_DEVICE, *overrides)
        loaded.config.samples.load.load()(loaded.config, loaded.folder)

    with pytest.raises(error, match=told):
        prepare()


def test_too_few_pairs_for_validation_are_told(tmp_path, base):
    few = ("data.validation_fraction=1e-3", "log.validation_interval=1")
    loaded = load(tmp_path / "run", base, *settings_of(tmp_path, "dpo", base), *few)
    with pytest.raises(DataError, match=r"validation_fraction: pairs: .* 1; .* needed; .*a larger validation_fraction"):
        loaded.config.samples.load.load()(loaded.config, loaded.folder)


def test_preview_shows_both_answers(tmp_path, base, capsys):
    settings = settings_of(tmp_path, "dpo", base)
    load(tmp_path / "run", base)
    assert main(["data", "preview", str(tmp_path / "run.yaml"), *settings, "-n", "1"]) == 0
    said = capsys.readouterr().out
    assert said.count("-- document 0") == 2
    assert "[[" in said
    assert main(["data", "check", str(tmp_path / "run.yaml"), *settings]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path / 'preferences.jsonl'}:\n80 conversations, " in said  # both answers of each
    assert "note: rows that come again" in said
