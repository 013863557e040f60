"""Trainer: arguments under the names that people bring become settings of a run, or are refused by name."""

import pytest

from polyreme.errors import ConfigError
from polyreme.nn import LoRA
from polyreme.trainer import Trainer, TrainingArguments
from tests.recipes.tiny_tune import write_base, write_chats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    write_base(folder / "base")
    write_chats(folder / "chats.jsonl", 60)
    return folder


def trainer(folder, settings=None, **arguments):
    settings = {"max_seq_len": 48, "packing": False, **(settings or {})}
    args = TrainingArguments(str(folder / "run"), data_parallel_degree=1, **arguments)
    return Trainer(folder / "base", args, folder / "chats.jsonl", lora_config=LoRA(rank=2), settings=settings)


def test_arguments_are_settings_of_the_run(folder):
    config = trainer(
        folder,
        num_train_epochs=2.5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        warmup_ratio=0.1,
        fp16=True,
        fp16_opt_level="O2",
        evaluation_strategy="no",
        save_strategy="no",
        report_to=["none"],
        logging_steps=3,
        seed=7,
    ).config
    # 57 conversations are not held out: 14 batches of 4 in a pass
    assert (config.train.steps, config.train.warmup_steps) == (35, 4)
    assert (config.train.global_batch, config.train.accumulation, config.train.seed) == (4, 2, 7)
    assert (config.train.amp_level, config.train.amp_dtype) == ("O2", "float16")
    assert (config.log.interval, config.log.validation_interval, config.log.tensorboard) == (3, 0, False)
    assert config.checkpoint.interval == 0
    assert trainer(folder, bf16=True).config.train.amp_dtype == "bfloat16"
    assert trainer(folder).config.train.steps == 200
    assert trainer(folder, max_steps=9).config.train.steps == 9


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"learning_rat": 1}, r"learning_rat is no argument here; did you mean 'learning_rate'\?"),
        ({"eval_strategy": "no"}, "eval_strategy is no argument here; give evaluation_strategy"),
        ({"per_device_eval_batch_size": 1}, "validation takes batches of train_batch_size rows"),
        ({"cutoff_len": 9}, r"it is max_seq_len of a configuration: Trainer\(\.\.\., settings="),
        ({"packing": True}, "it is one of Trainer's settings"),
        ({"lr_scheduler_type": "linear"}, "lr_scheduler_type='linear'; here it is 'cosine'"),
        ({"optim": "adafactor"}, "optim='adafactor'"),
        ({"adam_epsilon": 1e-6}, "adam_epsilon=1e-06; here it is 1e-08"),
        ({"sharding": "stage4"}, "sharding='stage4'"),
        ({"bf16": True, "fp16": True}, "give one of them"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "give a share of the steps"),
        ({"max_steps": 3, "num_train_epochs": 1}, "give a number of steps, or of passes"),
        ({"num_train_epochs": float("nan")}, "give a number of steps, or of passes"),
        ({"per_device_train_batch_size": "4"}, "per_device_train_batch_size='4'; give a whole number"),
        ({"tensor_parallel_degree": 0}, "tensor_parallel_degree=0; give the number of devices"),
        ({"sharding": "stage2"}, "over one device, which would split nothing; give sharding_parallel_degree above 1"),
        ({"recompute_granularity": "core"}, "recompute_granularity='core'; here it is 'core_attn' or"),
        ({"report_to": None}, "report_to=None; here it is 'tensorboard'"),
    ],
)
def test_arguments_that_cannot_be_are_refused(folder, arguments, message):
    with pytest.raises(ConfigError, match=message):
        trainer(folder, **arguments)
    with pytest.raises(ConfigError, match=r"Trainer: max_seq_len"):
        trainer(folder, {"max_seq_len": 1})
