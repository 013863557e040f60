"""What a resumed run may change."""

import pytest

from polyreme.errors import ConfigError, DataError
from polyreme.recipes.config import DataConfig, LogConfig, PlanConfig, PretrainConfig, TrainConfig, flatten
from polyreme.recipes.training.resume import changes, check_config, check_data


def test_where_and_how_long_may_change():
    saved = flatten(PretrainConfig())
    now = PretrainConfig(train=TrainConfig(steps=500), plan=PlanConfig(dp=2), log=LogConfig(interval=1), output="b")
    assert check_config(saved, now) == changes(saved, now)
    assert set(changes(saved, now)) == {"train.steps", "plan.dp", "log.interval", "output"}


def test_what_ended_a_run_may_be_set_otherwise():
    saved = flatten(PretrainConfig())
    train = TrainConfig(non_finite="skip", max_skipped=3, replica_interval=0)
    check_config(saved, PretrainConfig(train=train, data=DataConfig(worker_timeout=900.0, skip_bad=2)))


def test_what_is_computed_may_not():
    with pytest.raises(ConfigError, match=r"train\.seed was 0, is 1"):
        check_config(flatten(PretrainConfig()), PretrainConfig(train=TrainConfig(seed=1)))


def test_data_must_be_the_same():
    check_data("abc", "abc")
    with pytest.raises(DataError, match="training data has changed"):
        check_data("abc", "abd")
