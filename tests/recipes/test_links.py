"""`polyreme doctor --cluster`: links and ranks of a job measured and held against a data sheet."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polyreme.cli.main import main
from polyreme.errors import ConfigError
from polyreme.planner.calibration import declared
from polyreme.recipes.planning import links


def with_links(bandwidth, count=8):
    """So many of this machine's devices, as declared, with links of such a bandwidth."""
    cluster = declared(count)
    return replace(cluster, links=tuple(replace(link, bandwidth=bandwidth) for link in cluster.links))


@given(st.integers(2, 80))
def test_pairs_of_a_round_share_no_member(count):
    rounds = list(links._rounds(count))
    pairs = [pair for each in rounds for pair in each]
    assert len(pairs) == len(set(pairs))
    assert all(0 <= first < second < count for first, second in pairs)
    for each in rounds:
        members = [member for pair in each for member in pair]
        assert len(members) == len(set(members))
    if count <= 32:
        assert len(pairs) == count * (count - 1) // 2
    assert {member for pair in pairs for member in pair} == set(range(count))


def test_devices_of_one_process_are_held_against_a_data_sheet(monkeypatch):
    monkeypatch.setattr(links, "_REPEATS", 1)
    four = jax.devices()[:4]
    monkeypatch.setattr(jax, "devices", lambda: four)  # a program for each pair of all eight takes six seconds
    monkeypatch.setattr(jax, "local_devices", lambda: four)
    sheet = with_links(1e15, 4)
    assert links._link_bandwidth(sheet, 0, 3) == 1e15
    report = links.examine(sheet)
    assert (report.num_devices, report.members, len(report.ranks)) == (4, "device", 1)
    assert [(r.kind, r.nbytes) for r in report.collectives] == [("all-reduce", 1 << 22), ("all-gather", 1 << 22)]
    assert [(p.first, p.second) for p in report.pairs] == [(i, j) for i in range(4) for j in range(i + 1, 4)]
    for rate in report.collectives:
        sent = (2 if rate.kind == "all-reduce" else 1) * 3 / 4 * rate.nbytes
        assert rate.bandwidth == pytest.approx(sent / rate.seconds)
    assert not report.is_well
    assert sum("of what the data sheet gives" in each for each in report.findings) == 2 + 6
    said = links.as_text(report)
    assert said.count("FAIL") == 8
    assert json.loads(links.as_json(report))["ok"] is False


def test_what_is_slow_is_named():
    def found(pairs=(), seconds=(1.0, 1.0), least=0.5):
        ranks = [links.RankRate(at, f"h{at}", value) for at, value in enumerate(seconds)]
        return list(links._findings("rank", [], [links.PairRate(*pair) for pair in pairs], ranks, least))

    assert found() == []
    assert found(seconds=(1.0, 1.4, 1.0)) == []
    assert found(seconds=(1.0, 1.6))[0].startswith("rank 1 on h1 is slow: 1.6e+03 ms for what usually takes 1e+03 ms")
    fast, slow, far = (0, 1, True, 9e9), (0, 2, True, 4e9), (0, 3, False, 1e9)
    # what lies farther is not measured by what is near
    assert found([fast, slow, (1, 2, True, 9e9), far]) == ["ranks 0 and 2: 4 GB/s, 44% of what such pairs have"]
    assert found([fast, slow, (1, 2, True, 9e9), far], least=0.4) == []


def test_what_cannot_be_examined_is_refused(tmp_path, capsys, monkeypatch):
    with pytest.raises(ConfigError, match="--sheet is of 4 devices, here are 8"):
        links.examine(declared(4))
    (first, *_) = links.jax.devices()
    monkeypatch.setattr(links.jax, "devices", lambda: [first])
    with pytest.raises(ConfigError, match="one device; start it over several with polyreme launch"):
        links.examine()
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"device": "h100", "devices_per_node": 8}))
    assert main(["doctor", "--sheet", str(tmp_path / "c.yaml")]) == 2
    assert "add --cluster" in capsys.readouterr().err


@pytest.mark.slow
def test_a_slow_rank_of_a_launched_job_is_named(tmp_path):
    words = [sys.executable, "-m", "polyreme.cli.main", "launch", "--nproc_per_node", "3", "doctor", "--cluster"]
    told = {"CPU_NUM": "1", "POLYREME_INIT_TIMEOUT": "60", "FAULTS": "rank1:doctor.compute:delay=0.2"}
    done = subprocess.run(
        words, cwd=tmp_path, env=os.environ | told, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "3 x cpu, 3 ranks; data sheet: none" in done.stdout
    assert "FAIL rank 1 on " in done.stdout
    assert not any(f"FAIL rank {rank} on" in done.stdout for rank in (0, 2))
    assert "no restart is allowed" in done.stderr
