"""Stage grpo: what the model writes is what is learnt, by a rule's rewards, drawn again the same."""

import jax
import numpy as np
import pytest

from polyreme.distributed.placement import clear_plan
from polyreme.errors import ConfigError
from polyreme.recipes.data.batches import Numbered, gather
from polyreme.recipes.training.rewards import load_reward
from polyreme.recipes.training.rollouts import Rollouts
from polyreme.recipes.training.trainer import Trainer, told
from tests.recipes.tiny_run import ONE_DEVICE
from tests.recipes.tiny_tune import load, write_base

SETTINGS = (
    *("stage=grpo", "fine_tuning=full", "lora_rank=8", "group_size=6", "max_new_tokens=6"),
    *("reward=tests.recipes.test_rollouts:likes_letters", "train.learning_rate=1e-2", "train.warmup_steps=1"),
    *("train.steps=40", *ONE_DEVICE),
)


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


def likes_letters(text, answer):
    """How much of a text is letters; the answer is not asked."""
    return sum(character.isalpha() for character in text) / max(len(text), 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "llama")


def start(folder, base, *overrides):
    loaded = load(folder / "run", base, *SETTINGS, *overrides)
    config = loaded.config
    data = config.samples.load.load()(config, loaded.folder)
    trainer = Trainer(config, jax.devices()[:1])
    return trainer, data, Rollouts(config, trainer, data)


def knows_nothing(text, answer):
    return float("nan")


def test_rewards_rise_and_draws_are_the_same_again(tmp_path, base):
    trainer, data, roll_out = start(tmp_path, base, "kl_weight=0.01")
    samples = Numbered(data.train)
    rewards = []
    for step in range(1, 13):
        prompts = gather(samples, range(4))
        batch = roll_out(prompts, step)
        labels, old, reference, facts = batch.labels
        if step == 1:
            counts = roll_out.engine.statistics
            assert 6 * counts.prefix_tokens_hit >= 5 * counts.prefix_tokens_queried > 0  # one of a group takes it in
            again = roll_out(prompts, step)
            np.testing.assert_array_equal(again.inputs, batch.inputs)
            assert not np.array_equal(roll_out(prompts, 2).inputs, batch.inputs)
            # what the log-probabilities are of: the tokens after the prompt alone, up to one that ends a text
            assert ((labels != -100) == (old != 0)).all()
            counts = (labels != -100).sum(-1)
            assert counts.min() >= 1
            assert counts.max() <= 6
            np.testing.assert_allclose(reference, old, atol=1e-4)  # the model is as it began
            np.testing.assert_allclose(facts[..., 0].mean(1), 0, atol=1e-5)
        result = trainer.step(batch.inputs, batch.labels)
        if step == 1:
            assert float(result.loss) == pytest.approx(0, abs=1e-5)  # the ratio is 1, and advantages cancel out
            assert float(result.grad_norm) > 1e-3
        rewards.append(told(result)["reward"])
    assert np.mean(rewards[-3:]) > np.mean(rewards[:3]) + 0.05, rewards


def test_rewards_by_name():
    with pytest.raises(ConfigError, match="reward=builtins:pow of 'a' failed: TypeError"):
        load_reward("builtins:pow")("a", "b")
    with pytest.raises(ConfigError, match="is nan; give a finite number"):
        load_reward("tests.recipes.test_rollouts:knows_nothing")("a", "b")
    assert load_reward("exact_match")(" a ", "a") == 1
    assert load_reward("rouge_l")("a b", "a c") == pytest.approx(0.5)
    with pytest.raises(ConfigError, match="unknown reward 'exact'; did you mean 'exact_match'"):
        load_reward("exact")
    with pytest.raises(ConfigError, match="module:function of a module that can be imported"):
        load_reward("no.such:function")
    with pytest.raises(ConfigError, match="math has no function 'sine'; did you mean 'sin'"):
        load_reward("math:sine")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["plan.dp=2"], "stage grpo writes texts with the model, on one device"),
        (["log.validation_interval=5"], "stage grpo has nothing held out; set it to 0"),
        (["clip_ratio=1.5"], "clip_ratio"),
        (["stage=sft"], "has no use for it; leave it out, or set stage=grpo"),
    ],
)
def test_settings_that_groups_cannot_have(tmp_path, base, overrides, told):
    with pytest.raises(ConfigError, match=told):
        load(tmp_path / "run", base, *SETTINGS, *overrides)
