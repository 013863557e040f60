"""`polyreme device`: what it lists, how a check ends, and what of a command line is refused."""

import json

import pytest

from polyreme.cli.main import main
from polyreme.conformance import kit, speed
from polyreme.errors import DeviceError

FACTS = {"device": "cpu:0", "kind": "chip", "platform": "cpu", "platform_version": "1", "devices": 1,
         "factor_bits": 24, "jax": "0", "python": "3"}  # fmt: skip


def report_of(status):
    return kit.DeviceReport(FACTS, kit.KitOptions(), [kit.Outcome("tanh", status, 0.1, "off")], 1.0)


def test_devices_are_listed(capsys):
    assert main(["device", "list"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("* cpu ")
    assert "GiB" in first
    assert main(["device", "list", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts[0]["device"] == "cpu"
    assert facts[0]["total_memory"] > 0


def test_a_check_is_written_and_its_verdict_is_the_exit_code(tmp_path, capsys, monkeypatch):
    asked = []

    def run(name, options, on_outcome):
        asked.append((name, options))
        report = report_of("failed")
        on_outcome(report.outcomes[0])
        return report

    monkeypatch.setattr(kit, "run", run)
    words = [
        "device",
        "check",
        "cpu",
        "--sample",
        "3",
        "--jobs",
        "2",
        "--rows",
        "t*",
        "--output",
        str(tmp_path / "chip"),
    ]
    assert main(words) == 1
    assert asked == [("cpu", kit.KitOptions("t*", sample=3, jobs=2))]
    shown = capsys.readouterr()
    assert "failed: tanh: off" in shown.err
    assert shown.out.strip() == (tmp_path / "chip.md").read_text().strip()
    assert json.loads((tmp_path / "chip.json").read_text())["rows"]["failed"] == {"tanh": "off"}
    monkeypatch.setattr(kit, "run", lambda *_: report_of("passed"))
    assert main(["device", "check", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["conforming"]


def test_what_cannot_be_checked_is_refused(tmp_path, capsys, monkeypatch):
    assert main(["device", "check", "--rows", "nothing"]) != 0
    assert "no row or check is called 'nothing'" in capsys.readouterr().err
    assert main(["device", "check", "--library", "x.so"]) != 0
    assert "--library: give the NAME" in capsys.readouterr().err
    assert main(["device", "check", "cpu", "--compile-for", "v5e:2x2"]) != 0
    assert "--compile-for v5e:2x2: no device is used; leave cpu out" in capsys.readouterr().err
    monkeypatch.delenv("POLYREME_DEVICES", raising=False)
    assert main(["device", "check", "npu", "--library", str(tmp_path / "x.so")]) != 0
    assert "there is no file" in capsys.readouterr().err
    monkeypatch.delenv("POLYREME_DEVICES", raising=False)
    assert main(["device", "check", "--output", str(tmp_path / "none/x")]) != 0
    assert "there is no folder" in capsys.readouterr().err


def test_figures_have_units(capsys, monkeypatch):
    monkeypatch.setattr(speed, "BUDGET", 0.0)
    monkeypatch.setitem(speed.SIZES, "cpu", 64)
    assert main(["device", "bench", "cpu", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["product 64^3, float32"][1] == "TFLOP/s"
    assert all(value > 0 for value, _ in figures.values())


def test_a_device_that_is_not_there_is_told(capsys):
    assert main(["device", "bench", "npu"]) != 0
    assert "no npu is available" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="no npu"):
        speed.measure("npu")
