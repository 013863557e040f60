"""Made-up alignments, an Evoformer trained on them by configuration, and what such a configuration refuses."""

import jax
import numpy as np
import pytest

from polyreme.cli.main import main
from polyreme.distributed.placement import clear_plan
from polyreme.errors import DataError
from polyreme.models.families import LETTERS
from polyreme.recipes.config import PretrainConfig
from polyreme.recipes.data.alignments import EDGES, MASKED, PARTNER, AlignmentDataset, check_letters
from polyreme.recipes.data.batches import Numbered, gather
from polyreme.recipes.planning import communication, proving
from polyreme.recipes.training.trainer import Trainer
from polyreme.recipes.weights.base import load_trained
from tests.recipes.tiny_run import history, train

MODEL = {"family": "evoformer", "num_layers": 1, "msa_width": 8, "pair_width": 8, "msa_heads": 2, "head_dim": 4}
MODEL |= {"outer_width": 4, "triangle_width": 8, "num_sequences": 4, "num_residues": 8}
RUN = [*(f"model.{key}={value}" for key, value in MODEL.items()), "model.vocab_size=4096", "model.hidden_size=256"]
RUN += ["model.num_heads=8", "model.seq_len=128", "model.dropout=0", "data.synthetic_tokens=1000000"]
RUN += ["data.alignments=600", "plan.dp=8", "plan.sharding=1", "plan.mp=1", "plan.sharding_stage=0"]


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


def test_alignments_are_as_they_are_said_to_be():
    data = AlignmentDataset(3, 10, 50, 40, 24)
    again = AlignmentDataset(3, 0, 60, 40, 24)
    for one, other in zip(data[2], again[12], strict=True):
        np.testing.assert_array_equal(one, other)
    assert (data[1][0] != data[2][0]).any()
    with pytest.raises(IndexError, match="sample 50 of a data set of 50"):
        data[50]
    near = coupled = 0
    for i in range(20):
        letters, asked, distances = data[i]
        assert (asked >= 0).sum() == round(MASKED * letters.size)
        np.testing.assert_array_equal(asked >= 0, letters == LETTERS)
        np.testing.assert_array_equal(distances, distances.T)
        assert (np.diagonal(distances) == 0).all()
        # neighbours in the chain are one bond apart
        assert (np.diagonal(distances, 1) == np.digitize(3.8, EDGES)).all()
        whole = np.where(asked >= 0, asked, letters)
        for first, second in zip(*np.triu_indices(24, 4), strict=True):
            there = (whole[:, first] < 20) & (whole[:, second] < 20)
            agree = (PARTNER[np.minimum(whole[:, first], 19)] == whole[:, second])[there].mean()
            if agree > 0.7:
                coupled += 1
                near += distances[first, second] <= np.digitize(8.0, EDGES)
    # columns that vary together touch, and there are some of them: by chance a letter in twenty agrees
    assert coupled > 40
    assert near == coupled


def test_letters_are_checked():
    config = PretrainConfig.model_validate({"model": MODEL}).model
    batch = gather(Numbered(AlignmentDataset(0, 0, 4, 4, 8)), [3, 1])
    check_letters(batch, config, "step 1")
    with pytest.raises(DataError, match=r"step 1: letters have shape \[4, 8\], the model's are \[4, 9\]"):
        check_letters(batch, config.model_copy(update={"num_residues": 9}), "step 1")
    batch.inputs[1, 2, 3] = 22
    with pytest.raises(DataError, match="step 1: sample 1 has letter 22; there are 0 to 21"):
        check_letters(batch, config, "step 1")


REFUSED = [
    ({"model": MODEL | {"hidden_size": 64}}, "hidden_size=64: evoformer has none; its dimensions are num_layers, head"),
    ({"model": MODEL | {"num_kv_heads": 4}}, "num_kv_heads=4: evoformer has none"),
    ({"model": {"msa_width": 8}}, "msa_width=8: gpt has none; leave it out or set family: evoformer"),
    ({"model": MODEL, "plan": {"pp": 2}}, r"plan\.pp=2: evoformer has no use for it"),
    ({"model": MODEL, "plan": {"recompute": "core_attn"}}, "evoformer can compute again none or full"),
    ({"model": MODEL, "plan": {"recompute": "full", "recompute_share": 0.5}}, "runs its blocks in one loop"),
    ({"model": MODEL, "plan": {"sep": 3}}, r"model\.num_sequences=4 is not a multiple of plan\.sep"),
    ({"model": MODEL, "plan": {"mp": 4}}, r"model\.msa_heads=2 is not a multiple of plan\.mp=4"),
    ({"model": MODEL, "plan": {"mp": 4, "branch_axis": "mp"}}, r"evoformer has 2 branches; set plan\.mp=2"),
    ({"plan": {"mp": 2, "branch_axis": "mp"}}, r"gpt has no branches .* or set model\.family: evoformer"),
    (
        {"model": MODEL | {"outer_product_mean": "first"}, "plan": {"mp": 2, "branch_axis": "mp"}},
        r"evoformer has no branches .*, or set model\.outer_product_mean: end",
    ),
    ({"model": MODEL, "data": {"text": ["data/kjv.txt.gz"]}}, r"data\.text=.*: evoformer is trained on alignments"),
    ({"data": {"alignments": 7}}, r"data\.alignments=7: gpt is trained on tokens"),
]


@pytest.mark.parametrize(("settings", "match"), REFUSED)
def test_what_means_nothing_is_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        PretrainConfig.model_validate(settings)


@pytest.mark.slow
def test_it_learns_and_goes_on(tmp_path, capsys):
    train(tmp_path / "run", *RUN, "train.steps=12", "train.learning_rate=1e-2", "log.validation_interval=12")
    train(tmp_path / "run", *RUN, "train.steps=14", "train.learning_rate=1e-2", "log.validation_interval=12")
    rows = history(tmp_path / "run")
    assert len(rows) == 14
    # a fresh model thinks all letters and all distances alike
    assert rows[0][1] == pytest.approx(2 * np.log(21) + 0.3 * np.log(16), rel=1e-2)
    assert rows[-1][1] < rows[0][1] - 0.15
    _, meta = load_trained(tmp_path / "run")
    assert meta["step"] == 14
    assert main(["generate", str(tmp_path / "run"), "--prompt", "A"]) == 2
    assert "evoformer takes alignments, not tokens" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_learns_and_names_what_is_not_finite():
    config = PretrainConfig.model_validate({"model": MODEL, "train": {"global_batch": 2, "learning_rate": 1e-2}})
    trainer = Trainer(config, jax.devices()[:1])
    batch = gather(Numbered(AlignmentDataset(0, 0, 2, 4, 8)), [0, 1])
    losses = [float(trainer.step(batch.inputs, batch.labels).loss) for _ in range(6)]
    assert losses[-1] < losses[0] - 0.1
    trainer.model.blocks.layer.triangle_outgoing.norm.weight.set_value(np.full((1, 8), np.nan, "float32"))
    result = trainer.step(batch.inputs, batch.labels)
    name = trainer.first_bad_tensor(batch.inputs, batch.labels, result.key)
    assert name == "parameter blocks.layer.triangle_outgoing.norm.weight"


@pytest.mark.slow
def test_every_axis_at_once_equals_one_device_and_is_counted():
    train_ = {"global_batch": 4, "accumulation": 2}
    for sizes in ({"dp": 2, "sep": 2, "mp": 2, "branch_axis": "mp"}, {"sharding": 2, "sharding_stage": 3, "sep": 2}):
        plan = {"recompute": "full", **sizes}
        config = PretrainConfig.model_validate({"model": MODEL, "train": train_, "plan": plan})
        proof = proving.run(config, steps=1)
        assert proof.holds, str(proof)
    found = communication.report(config)
    assert found.expected is None
    assert found.unnamed == []
    assert "no formula is of this model" in found.as_text()
    by_kind = {(t.kind, t.axes): t.runs for t in found.totals}
    assert by_kind["all-to-all", ("sep",)] >= 6 * 2
