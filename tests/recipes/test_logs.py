"""The log of a run: whole lines, no step twice, TensorBoard files, the picture."""

import json
import math
import os
import sys

import numpy as np
import pytest
from PIL import Image

from polyreme.errors import ConfigError
from polyreme.recipes.config import LogConfig
from polyreme.recipes.training.logs import JsonlLog, LogWarning, RunLog, optional, plot_loss, read_jsonl, smooth


def steps(path):
    return [record["step"] for record in read_jsonl(path)]


def write_steps(path, first, last, resume_step=None):
    with JsonlLog(path, resume_step) as log:
        for step in range(first, last + 1):
            log.write({"kind": "train", "step": step, "loss": 1.0 / step})


def test_no_step_twice_after_resume(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 17)  # killed at 17, last checkpoint at 10
    write_steps(path, 11, 20, resume_step=10)
    assert steps(path) == list(range(1, 21))


@pytest.mark.parametrize("torn", [b'{"kind": "train", "st', b'{"step": 11}', b"\x00\x00\x00\n", b"[1]\n"])
def test_torn_last_line_is_repaired(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 10)
    with path.open("ab") as file:
        file.write(torn)
    assert steps(path) == list(range(1, 11))
    write_steps(path, 11, 12, resume_step=10)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, 13))


def test_every_cut_of_the_last_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 3)
    whole = path.read_bytes()
    start = whole[:-1].rindex(b"\n") + 1
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        write_steps(path, 3, 4, resume_step=2)
        assert steps(path) == [1, 2, 3, 4]


def test_resume_at_the_start_drops_everything(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_steps(path, 1, 5)
    write_steps(path, 1, 2, resume_step=0)
    assert steps(path) == [1, 2]


def test_new_run_keeps_the_old_log(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        write_steps(path, 1, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]


def test_numbers_json_does_not_have(tmp_path):
    with JsonlLog(tmp_path / "m.jsonl") as log:
        log.write({"step": 1, "loss": math.nan, "grad_norm": np.float32("inf"), "count": np.int64(3)})
    assert list(read_jsonl(tmp_path / "m.jsonl")) == [{"step": 1, "loss": "nan", "grad_norm": "inf", "count": 3}]


def train(folder, config, first=1, last=60, resume_step=None):
    with RunLog(folder, config, title="a run", tokens_per_step=4096, resume_step=resume_step) as log:
        for step in range(first, last + 1):
            log.train(step, {"loss": 2.0 + 4.0 / step, "learning_rate": 1e-3, "utilisation": None})
        log.validation(last, {"loss": 2.5})
        log.event("sample", last, {"text": "In the beginning"})


def test_everything_is_recorded(tmp_path):
    train(tmp_path, LogConfig())
    records = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert records[0] == {"kind": "train", "loss": 6.0, "learning_rate": 1e-3, "utilisation": None, "step": 1}
    assert records[-2] == {"kind": "validation", "loss": 2.5, "step": 60}
    assert records[-1] == {"kind": "sample", "step": 60, "text": "In the beginning"}


def test_tensorboard_files_hold_every_record(tmp_path):
    train(tmp_path, LogConfig(plot=False))
    (events,) = (tmp_path / "tensorboard").iterdir()
    data = events.read_bytes()
    for tag in (b"train/loss", b"train/learning_rate", b"validation/loss", b"sample/text"):
        assert tag in data
    assert data.count(b"train/loss") == 60
    assert b"utilisation" not in data


def test_picture_has_ink_and_both_curves(tmp_path):
    train(tmp_path, LogConfig(tensorboard=False))
    pixels = np.asarray(Image.open(tmp_path / "loss.png").convert("RGB")).astype(int)
    assert pixels.shape == (720, 1200, 3)
    blue, orange = np.array([31, 119, 180]), np.array([255, 127, 14])  # tab:blue, tab:orange
    for colour in (blue, orange):
        assert np.count_nonzero(np.abs(pixels - colour).max(-1) < 3) > 50
    assert [p.name for p in tmp_path.glob(".*")] == []


def test_nothing_to_draw(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"kind": "train", "step": 1, "loss": "nan"}\n')
    assert plot_loss(tmp_path / "m.jsonl", tmp_path / "loss.png", "t", tokens_per_step=1) is None
    assert not (tmp_path / "loss.png").exists()


def test_everything_turned_off(tmp_path):
    train(tmp_path, LogConfig(jsonl=False, tensorboard=False, plot=False))
    assert list(tmp_path.iterdir()) == []


def test_picture_needs_the_log(tmp_path):
    with pytest.raises(ConfigError, match=r"log\.plot=true needs log\.jsonl=true"):
        train(tmp_path, LogConfig(jsonl=False))


@pytest.mark.parametrize(("module", "setting"), [("tensorboardX", "log.tensorboard"), ("matplotlib", "log.plot")])
def test_missing_extra_is_named_before_the_run(tmp_path, monkeypatch, module, setting):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{setting}=true needs {module}.*pip install polyreme\[logs\]"):
        train(tmp_path, LogConfig())
    assert list(tmp_path.iterdir()) == []
    assert optional("json", "x") is json


def test_smooth_is_a_centred_mean():
    values = [8.0, 1.0, 3.0, 5.0, 9.0]
    np.testing.assert_allclose(smooth(values, 2), [8, 4, 26 / 5, 17 / 3, 9], rtol=1e-15 * 8)
    np.testing.assert_array_equal(smooth(values, 0), values)
    np.testing.assert_array_equal(smooth([3.0], 5), [3.0])


def test_a_full_disk_does_not_end_the_run(tmp_path, monkeypatch):
    # records 2 and 3 meet a full disk; what follows is written again
    monkeypatch.setenv("FAULTS", "log.write:raise=ENOSPC@2,log.write:raise=ENOSPC@3")
    with RunLog(tmp_path, LogConfig(plot=False), title="t", tokens_per_step=1, resume_step=None) as log:
        log.train(1, {"loss": 1.0})
        with pytest.warns(LogWarning, match=r"metrics\.jsonl: a record cannot be written \(No space left on device"):
            log.train(2, {"loss": 1.0})
        log.train(3, {"loss": 1.0})
        log.train(4, {"loss": 1.0})
        with pytest.warns(LogWarning, match=r"2 records of metrics\.jsonl were not written"):
            log.close()
    assert steps(tmp_path / "metrics.jsonl") == [1, 4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full")
# tensorboardX leaves a file open that it cannot flush
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_full_event_file_is_left_and_nobody_waits_for_it(tmp_path):
    log = RunLog(tmp_path, LogConfig(plot=False), title="t", tokens_per_step=1, resume_step=None)
    (event_file,) = (tmp_path / "tensorboard").iterdir()
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, next(fd for fd in map(int, os.listdir("/proc/self/fd")) if _target(fd) == str(event_file)))
    os.close(full)
    with pytest.warns(LogWarning, match="tensorboard: cannot be written"):
        log.train(1, {"loss": 1.0})
    for step in range(2, 40):  # SummaryWriter would wait for ever with the eleventh
        log.train(step, {"loss": 1.0})
    log.close()
    assert steps(tmp_path / "metrics.jsonl") == list(range(1, 40))


def _target(fd):
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return None
