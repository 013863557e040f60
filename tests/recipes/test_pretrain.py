"""Pretraining in this process: the data it reads, what it refuses, what it saves, and when a run is complete."""

import math
import re
import shutil

import numpy as np
import pytest

from polyreme.distributed.checkpoint import CheckpointWarning
from polyreme.distributed.placement import clear_plan
from polyreme.errors import CheckpointError, ConfigError, DataError, NumericsError, PlacementError
from polyreme.faults import FaultInjected
from polyreme.recipes.config import ModelConfig
from polyreme.recipes.data import batches, text_data
from polyreme.recipes.data.batches import Batch, Numbered, check_tokens, gather, ids_text
from polyreme.recipes.training import run
from polyreme.recipes.training.logs import read_jsonl
from tests.recipes.tiny_run import assert_same_state, history, load, saved, train


@pytest.fixture(autouse=True)
def _one_device_after():
    yield
    clear_plan()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folders of runs of 6 and of 10 steps that nothing disturbed, by that number."""
    folder = tmp_path_factory.mktemp("runs")
    for steps in (6, 10):
        train(folder / str(steps), f"train.steps={steps}")
    clear_plan()
    return {steps: folder / str(steps) for steps in (6, 10)}


@pytest.fixture
def copy(runs, tmp_path):
    """copy(steps): the folder of such a run, to go on in."""
    return lambda steps: shutil.copytree(runs[steps], tmp_path / "run")


@pytest.fixture
def samples(monkeypatch):
    """Ids of the samples of every training step, in order."""
    seen = []

    def record(batch, model, what):
        if what.startswith("step"):
            seen.append(tuple(int(i) for i in batch.ids))
        check_tokens(batch, model, what)

    monkeypatch.setattr(batches, "check_tokens", record)
    return seen


def test_a_mesh_of_other_devices_is_refused_before_anything_is_read_or_written(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "load_data", None)
    with pytest.raises(PlacementError, match=r"needs 4 devices, 8 given"):
        train(tmp_path / "run", "plan.dp=1")
    assert not any((tmp_path / "run").iterdir())


def kill_before(monkeypatch, step):
    monkeypatch.setenv("FAULTS", f"train.step:raise@{step}")


@pytest.mark.slow
def test_no_sample_repeated_or_lost_with_other_workers_and_over_epochs(tmp_path, monkeypatch, samples):
    # 450 tokens make 28 samples, 3 batches an epoch: stops in the middle and at the very end of an epoch
    settings = ["data.synthetic_tokens=500", "data.validation_fraction=0.1", "checkpoint.interval=1", "train.steps=8"]
    train(tmp_path / "whole", *settings)
    expected, samples[:] = list(samples), []
    assert len({i for batch in expected[:3] for i in batch}) == 24
    assert expected[:3] != expected[3:6]
    for workers, stop in ((0, 2), (2, 4), (1, 7)):
        kill_before(monkeypatch, stop)
        with pytest.raises(FaultInjected):
            train(tmp_path / "run", *settings, f"data.num_workers={workers}")
    monkeypatch.delenv("FAULTS")
    train(tmp_path / "run", *settings)
    assert samples == expected
    assert_same_state(tmp_path / "run", tmp_path / "whole")
    assert history(tmp_path / "run") == history(tmp_path / "whole")


@pytest.mark.slow
def test_logged_rate_is_the_one_used(runs):
    for step, _, rate, _ in history(runs[10]):
        # 4 steps of warm-up from a quarter of 1e-3, each a quarter of the rest; then a cosine of 6 steps
        warm = 1e-3 / 4 + (1e-3 - 1e-3 / 4) * (step - 1) / 4
        expected = warm if step <= 4 else 1e-3 * (1 + math.cos(math.pi * (step - 5) / 6)) / 2
        assert rate == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_complete_run_says_so_and_goes_on_when_steps_are_raised(copy, tmp_path, capsys, samples):
    before = saved(copy(6))
    log = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    train(tmp_path / "run", "train.steps=6")
    assert "this run is complete: 6 of 6 steps are done" in capsys.readouterr().out
    assert not samples
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == log
    assert saved(tmp_path / "run")[1] == before[1]
    train(tmp_path / "run", "train.steps=8")
    out = capsys.readouterr().out
    assert "train.steps: 6 -> 8" in out
    # step 7 of a cosine over 8 - 4 steps is at its half; the old one has ended
    assert "schedule of 8 steps from here on: 0.0005 at step 7, where that of 6 steps has 0\n" in out
    steps = history(tmp_path / "run")
    assert [row[0] for row in steps] == list(range(1, 9))
    assert steps[6][2] == pytest.approx(5e-4, rel=1e-12)


def test_fewer_steps_than_are_done(copy, tmp_path):
    copy(6)
    with pytest.raises(ConfigError, match=r"train\.steps=5, but the checkpoint in .* is of step 6"):
        train(tmp_path / "run", "train.steps=5")


def test_going_back_discards_what_came_after(copy, tmp_path, capsys):
    copy(10)
    capsys.readouterr()
    train(tmp_path / "run", "train.steps=10", resume="5")
    assert "went back to step 5; checkpoints after it are discarded: [10]" in capsys.readouterr().out
    assert [row[0] for row in history(tmp_path / "run")] == list(range(1, 11))
    with pytest.raises(CheckpointError, match="step 7 is not in"):
        train(tmp_path / "run", "train.steps=10", resume="7")


@pytest.mark.slow
def test_a_kill_after_going_back_does_not_bring_the_later_steps_back(copy, tmp_path, monkeypatch):
    copy(10)
    kill_before(monkeypatch, 7)
    with pytest.raises(FaultInjected):
        train(tmp_path / "run", "train.steps=10", resume="5")
    assert saved(tmp_path / "run")[1]["step"] == 5


def test_training_anew_keeps_the_earlier_run(copy, tmp_path, capsys):
    copy(6)
    rings = "plan.sequence_parallel=true", "plan.overlap={mp: ring}"
    train(tmp_path / "run", "train.steps=2", "train.warmup_steps=0", "train.seed=1", *rings, resume="never")
    printed = capsys.readouterr().out
    assert "checkpoints/ of an earlier run is kept as checkpoints.1/" in printed
    assert "overlap (mp by ring) hides nothing on cpu" in printed
    assert (tmp_path / "run" / "checkpoints.1" / "step_00000006").is_dir()
    assert [row[0] for row in history(tmp_path / "run")] == [1, 2]
    assert saved(tmp_path / "run")[1]["step"] == 2


@pytest.mark.slow
def test_log_of_a_resumed_run_has_the_same_steps(tmp_path, monkeypatch):
    settings = ["log.interval=4", "train.steps=10"]
    train(tmp_path / "whole", *settings)
    kill_before(monkeypatch, 7)
    with pytest.raises(FaultInjected):
        train(tmp_path / "run", *settings)
    monkeypatch.delenv("FAULTS")
    with (tmp_path / "run" / "metrics.jsonl").open("a") as log:
        log.write('{"kind": "train", "step": 6, "lo')  # as a kill in the middle of a write leaves it
    train(tmp_path / "run", *settings)
    assert [row[0] for row in history(tmp_path / "whole")] == [1, 4, 8, 10]
    assert history(tmp_path / "run") == history(tmp_path / "whole")


def test_changed_configuration_or_data_is_refused_before_a_model_is_made(tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word. " * 400)
    settings = [f"data.text={text}", "train.steps=5", "data.tokenizer_vocab_size=300"]
    train(tmp_path / "run", *settings)
    monkeypatch.setattr(run, "Trainer", None)
    with pytest.raises(ConfigError, match=r"model\.hidden_size was 32, is 64"):
        train(tmp_path / "run", *settings, "model.hidden_size=64")
    text.write_text("In the beginning was the deed. " * 400)
    with pytest.raises(DataError, match="training data has changed"):
        train(tmp_path / "run", *settings)


@pytest.mark.slow
def test_nan_stops_the_run_before_the_update(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "train.nan:raise@7")
    with pytest.raises(
        NumericsError,
        match=r"step 7: loss nan, gradient norm nan; the first tensor that is not finite is the parameter norm\.bias; "
        r"samples \d+(, \d+){7}\. The update was left out; the checkpoint of step 5 is the last one",
    ):
        train(tmp_path / "run")
    arrays, meta = saved(tmp_path / "run")
    assert meta["step"] == 5
    assert all(np.isfinite(a).all() for a in arrays.values())
    monkeypatch.delenv("FAULTS")
    train(tmp_path / "run", "train.steps=20")
    train(tmp_path / "whole", "train.steps=20")
    assert_same_state(tmp_path / "run", tmp_path / "whole")


def test_steps_that_are_not_finite_or_spikes_are_left_out_by_policy(tmp_path, monkeypatch, capsys):
    settings = ["train.steps=26", "train.non_finite=skip", "train.spike=skip", "checkpoint.interval=24"]
    monkeypatch.setenv("FAULTS", "train.nan_once:raise@3,train.nan_once:raise@4,train.spike:raise@23")
    train(tmp_path / "run", *settings, "train.max_skipped=2")
    lines = capsys.readouterr().out
    assert "step 3: loss nan, gradient norm nan: not finite; the update was left out, 1 in a row; samples" in lines
    assert "step 4: loss nan, gradient norm nan: not finite; the update was left out, 2 in a row; samples" in lines
    assert re.search(r"step 23: loss .*: a spike; the update was left out, 1 in a row", lines)
    kinds = [(r["kind"], r["step"]) for r in read_jsonl(tmp_path / "run" / "metrics.jsonl") if r["kind"] != "train"]
    assert kinds == [("not_finite", 3), ("not_finite", 4), ("spike", 23)]
    # the statistic goes on from the checkpoint
    _, meta = saved(tmp_path / "run")
    assert meta["host"]["spikes"][0] == [24.0, 24.0]
    monkeypatch.setenv("FAULTS", "train.nan:raise@2")
    with pytest.raises(NumericsError, match=r"step 4: .*; 3 steps in a row were left out \(train\.max_skipped=2\)"):
        train(tmp_path / "other", *settings, "train.max_skipped=2")


def test_bad_token_stops_the_run_before_the_step(tmp_path, monkeypatch):
    load_corpus = text_data.load_corpus

    def corrupt(config, base):
        corpus = load_corpus(config, base)
        window = corpus.train.tokens.window

        def corrupted(start, count):
            tokens = window(start, count)
            tokens[40 - start : 41 - start] = 600  # in sample 40 // 16 = 2, at 8; also the label before it
            return tokens

        corpus.train.tokens.window = lambda start, count: (corrupted if start <= 40 else window)(start, count)
        return corpus

    monkeypatch.setattr(text_data, "load_corpus", corrupt)
    settings = ["data.synthetic_tokens=500", "data.validation_fraction=0.3"]
    with pytest.raises(DataError, match=r"step \d: sample 2 has token 600 at position 8, but model\.vocab_size=512"):
        train(tmp_path / "run", *settings)


def test_negative_tokens_and_labels():
    good = np.zeros((2, 3), np.int32)
    bad = np.array([[0, 0, 0], [0, -1, 0]], np.int32)
    check_tokens(Batch(np.array([5, 9]), good, good), ModelConfig(vocab_size=8), "step 1")
    with pytest.raises(DataError, match="step 1: sample 9 has token -1 at position 1"):
        check_tokens(Batch(np.array([5, 9]), bad, good), ModelConfig(vocab_size=8), "step 1")
    with pytest.raises(DataError, match="sample 9 has label -1 at position 1"):
        check_tokens(Batch(np.array([5, 9]), good, bad), ModelConfig(vocab_size=8), "step 1")


def test_samples_keep_their_number():
    data = Numbered([(np.full(2, i), np.full(2, -i)) for i in range(4)])
    assert len(data) == 4
    batch = gather(data, [3, 1])
    np.testing.assert_array_equal(batch.ids, [3, 1])
    np.testing.assert_array_equal(batch.inputs, [[3, 3], [1, 1]])
    np.testing.assert_array_equal(batch.labels, [[-3, -3], [-1, -1]])
    assert ids_text(np.arange(2)) == "0, 1"


@pytest.mark.slow
def test_failed_background_save_surfaces_at_a_later_step(tmp_path, monkeypatch):
    monkeypatch.setenv("FAULTS", "ckpt.data:raise@1,train.step:delay=0.2")
    with pytest.raises(CheckpointError, match="save of step 5 failed"):
        train(tmp_path / "run", "train.steps=9")
    assert [row[0] for row in history(tmp_path / "run")][-1] < 9
    monkeypatch.delenv("FAULTS")
    train(tmp_path / "run", "train.steps=9")
    assert saved(tmp_path / "run")[1]["step"] == 9


def test_a_damaged_checkpoint_ends_a_strict_run_and_is_passed_over_else(copy, runs, tmp_path):
    newest = max((copy(6) / "checkpoints").glob("step_*"))
    data = min(newest.glob("data-*"))
    content = bytearray(data.read_bytes())
    content[100] ^= 1
    data.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"^step 6 of .*{data.name}: tensor .* is corrupt"):
        train(tmp_path / "run", "train.steps=6", "checkpoint.strict=true")
    with pytest.warns(CheckpointWarning, match="step 6 passed over"):
        train(tmp_path / "run", "train.steps=6")
    assert_same_state(tmp_path / "run", runs[6])
    assert history(tmp_path / "run") == history(runs[6])


def test_folder_that_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(text_data, "load_corpus", None)
    (tmp_path / "file").write_text("in the way")
    config = load(tmp_path / "run").config
    for output, why in ((tmp_path / "file", "is a file; a folder is needed"), ("/proc/no/run", "cannot be written")):
        there = config.model_copy(update={"output": str(output)})
        with pytest.raises(ConfigError, match=why):
            run.run(there, resume="auto", overrides_source={"folder": tmp_path, "resume_command": []})


@pytest.mark.slow
def test_validation_changes_nothing(runs, tmp_path):
    train(tmp_path / "with", "train.steps=6", "log.validation_interval=2", "log.validation_batches=2")
    assert history(tmp_path / "with") == history(runs[6])
    (a, _), (b, _) = saved(tmp_path / "with"), saved(runs[6])
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    records = [r for r in read_jsonl(tmp_path / "with" / "metrics.jsonl") if r["kind"] == "validation"]
    assert [r["step"] for r in records] == [2, 4, 6]
