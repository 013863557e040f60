"""What `--dry-run` and `polyreme plan` say that a step of fine-tuning holds."""

from itertools import pairwise

import pytest

from polyreme.recipes.planning.plan import memory_of
from tests.recipes.tiny_tune import load, write_base

SHARED = ("plan.dp=1", "plan.sharding=1", "plan.mp=1", "plan.sharding_stage=0")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("memory") / "base")


@pytest.fixture(scope="module")
def memory(base):
    def of(*overrides):
        rank = [] if any(words.startswith("lora_rank") for words in overrides) else ["lora_rank=8"]
        return memory_of(load(base.parent / "run", base, *SHARED, *rank, *overrides).config)

    return of


def test_what_is_frozen_has_no_state(memory):
    full, lora, freeze = (
        memory(f"fine_tuning={kind}", *more)
        for kind, more in (
            ("full", ()),
            ("lora", ()),
            ("freeze", ("freeze_trainable_layers=1",)),
        )
    )
    assert lora.optimizer < freeze.optimizer < full.optimizer / 2
    assert full.parameters < lora.parameters < 2 * full.parameters  # rank 8 beside maps of 32 x 32 to 64
    assert freeze.parameters == full.parameters
    assert freeze.activations < full.activations


def test_adapters_are_counted_by_rank_and_map(memory):
    plain = memory("fine_tuning=full").parameters
    q = memory("lora_target=[q_proj]").parameters - plain
    assert q == 2 * 8 * (32 + 32) * 4  # blocks, rank, ins and outs, bytes
    assert memory("lora_target=[q_proj]", "lora_rank=4").parameters - plain == q / 2
    assert memory("lora_target=[q_proj]").optimizer == 2 * q


def test_weights_in_few_bits_are_fewer_bytes(memory):
    sizes = [
        memory(*words).parameters
        for words in ((), ("weight_quantize_algo=weight_only_int8",), ("weight_quantize_algo=nf4",))
    ]
    assert all(more > fewer for more, fewer in pairwise(sizes))


def test_a_pair_is_two_rows(memory):
    sft, dpo = memory("fine_tuning=full", "packing=false"), memory("fine_tuning=full", "stage=dpo")
    assert dpo.activations > 1.9 * sft.activations


def test_a_teacher_is_beside_the_model(memory, base):
    plain = memory("fine_tuning=full")
    own = memory("fine_tuning=full", "stage=distill", f"teacher={base}")
    assert own.parameters == pytest.approx(2 * plain.parameters)
    assert own.workspace > plain.workspace
