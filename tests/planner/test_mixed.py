"""Stages on devices of several kinds: shares of the model by speed and by room."""

import itertools
import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from polyreme.cli.main import app
from polyreme.errors import ConfigError
from polyreme.mesh import Plan
from polyreme.planner import ModelShape, Training, cluster_of_kind, predict
from polyreme.planner.mixed import share_by_speed
from polyreme.planner.predict import stage_tails

SMALL = ModelShape(hidden=2048, layers=12, heads=16, seq=1024, vocab=32000, ffn=8192)
TRAINING = Training(cut="layers")


def kinds(*names):
    return [cluster_of_kind(name, 1) for name in names]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("schedule", ["1F1B", "VPP", "ZBVPP"])
def test_no_other_shares_are_shorter(schedule):
    plan = Plan.from_degrees(pp=2, num_microbatches=4, schedule=schedule)
    clusters = kinds("h100", "v100")
    best, even = share_by_speed(SMALL, plan, clusters, 16, Training("float16", cut="layers"))
    assert best.fits
    assert best.step_seconds < even.step_seconds
    assert sum(best.plan.chunk_items) == SMALL.layers
    fast = [items for items, stage in zip(best.plan.chunk_items, plan.stage_of_chunk, strict=True) if stage == 0]
    assert sum(fast) > SMALL.layers / 2
    if schedule == "1F1B":
        others = [replace(plan, chunk_items=(n, SMALL.layers - n)) for n in range(1, SMALL.layers)]
        every = [share_by_speed(SMALL, other, clusters, 16, Training("float16", cut="layers"))[1] for other in others]
        assert best.step_seconds == min(one.step_seconds for one in every)


def test_one_kind_is_priced_as_a_plan_of_it():
    plan = Plan.from_degrees(pp=2, dp=2, num_microbatches=8, chunk_items=[6, 6])
    _, even = share_by_speed(SMALL, plan, kinds("a100-80g", "a100-80g"), 32, TRAINING)
    whole = predict(SMALL, plan, cluster_of_kind("a100-80g", 4), 32, TRAINING)
    # what predict hides behind other stages' work, the tails of stages that end sooner, is counted whole here
    tails = stage_tails(SMALL, plan, cluster_of_kind("a100-80g", 4), 32, TRAINING)
    assert whole.step_seconds <= even.step_seconds <= whole.step_seconds + max(tails)
    assert even.stages == whole.stages


def test_blocks_leave_a_stage_without_room_for_them():
    large = ModelShape(hidden=4096, layers=16, heads=32, seq=2048, vocab=32000, ffn=16384)
    plan = Plan.from_degrees(pp=2, num_microbatches=4, recompute="full")
    best, even = share_by_speed(large, plan, kinds("h200", "v100-16g"), 8, Training("float16", cut="layers"))
    assert not even.fits
    assert best.fits
    assert best.plan.chunk_items[1] < 8
    assert even.overflow > 0 == best.overflow


def test_what_cannot_be_dealt_out_is_refused():
    with pytest.raises(ConfigError, match="1 kinds for the 2 stages of mesh pp2; give one a stage"):
        share_by_speed(SMALL, Plan.from_degrees(pp=2, num_microbatches=2), kinds("h100"), 8)
    plan = Plan.from_degrees(pp=2, num_microbatches=2, chunk_items=[3, 3])
    with pytest.raises(ConfigError, match=r"chunk_items=\[3, 3\] are 6 of model .*, which has 12 to cut; make them 12"):
        predict(SMALL, plan, cluster_of_kind("h100", 2), 8, TRAINING)


def test_the_command_writes_a_configuration_with_the_shares(tmp_path):
    config, written = tmp_path / "run.yaml", tmp_path / "mixed.yaml"
    config.write_text(
        "model: {family: llama, vocab_size: 512, hidden_size: 256, num_layers: 8, num_heads: 8, seq_len: 128}\n"
        "data: {synthetic_tokens: 4000}\ntrain: {global_batch: 8, accumulation: 4}\nplan: {pp: 2}\n"
    )
    words = ["plan", str(config), "--stages", "h100,v100"]
    run = CliRunner().invoke(app, [*words, "--json", "--output", str(written)])
    assert run.exit_code == 0, run.output
    answer = json.loads(run.stdout)
    assert sum(answer["plan"]["chunk_items"]) == sum(itertools.chain(*(row["items"] for row in answer["stages"])))
    text = str(answer["plan"]["chunk_items"])
    assert f"chunk_items: {text}" in written.read_text()
    assert answer["step_seconds"] <= answer["even"]["step_seconds"]
    shown = CliRunner().invoke(app, words)
    assert "H100-SXM5-80GB" in shown.output
    assert "in even shares" in shown.output
    huge = [*words, "model.hidden_size=16384", "model.num_layers=128"]
    for recompute, advice in (("none", "plan.sharding, or set plan.recompute=full"), ("full", "plan.sharding")):
        refused = CliRunner().invoke(app, [*huge, f"plan.recompute={recompute}"])
        assert str(refused.exception).splitlines()[0].endswith(advice)
    refused = CliRunner().invoke(app, [*words[:-1], "h100"])
    assert "1 kinds, and plan.pp is 2; give a kind for each stage" in str(refused.exception or refused.output)
