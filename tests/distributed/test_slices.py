"""Compiled for a TPU slice that is not here: kernels, options and overlap are the TPU's. Takes libtpu."""

import re
from pathlib import Path

import pytest

from polyreme.errors import ConfigError
from polyreme.kernels import select
from polyreme.recipes import communication, config_file, plan_job

CONFIG = Path(__file__).parent.parent.parent / "configs" / "moe_kjv.yaml"
SMALL = [
    f"{key}={value}"
    for key, value in {
        "model.hidden_size": 256,
        "model.ffn_size": 512,
        "model.num_layers": 1,
        "model.num_heads": 2,
        "model.seq_len": 256,
        "train.accumulation": 1,
        "train.amp_level": "O2",
        "plan.dp": 1,
        "plan.pp": 1,
        "plan.sharding": 1,
        "plan.sharding_stage": 0,
        "plan.ep": 8,
    }.items()
]


@pytest.fixture
def libtpu():
    return pytest.importorskip("libtpu", reason="needs libtpu: install polyreme[tpu-check]")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "kind"), [("padded", "all-to-all"), ("auto", "ragged-all-to-all")])
def test_rows_for_experts_travel_while_others_compute(libtpu, how, kind):
    hidden = {}
    for parts in (1, 2):
        words = [*SMALL, f"plan.expert_dispatch={how}", f"plan.overlap={{moe: {parts}}}"]
        # products of this size are too short to hide a byte for each 1000 FLOP
        report = communication.report(config_file.load(CONFIG, words).config, 100.0, "v5e:2x4")
        rows = [c for c in report.collectives if c.kind == kind and c.payload > 10_000]
        assert all(c.is_async for c in rows)
        hidden[parts] = sum(c.total_wire for c in rows if c.overlap == "overlapped") / sum(c.total_wire for c in rows)
    assert hidden[2] >= 0.45
    assert hidden[2] > hidden[1]


def test_without_libtpu_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(plan_job.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"compiling for v5e:2x4 needs libtpu; install polyreme\[tpu-check\]"):
        plan_job.devices_for(8, "v5e:2x4")


def test_kernels_are_chosen_for_the_device_compiled_for():
    class Chip:
        platform = "tpu"

    assert select.backend() == "cpu"
    with select.compiling_for(Chip()):
        assert (select.backend(), select.platform()) == ("tpu", "tpu")
    assert select.backend() == "cpu"


def test_the_block_of_the_page_runs(capsys):
    page = (CONFIG.parent.parent / "docs" / "overlap.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(block, "overlap.md", "exec"), {})
    assert capsys.readouterr().out == "moe in 2 parts\n"
