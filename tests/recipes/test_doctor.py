"""The doctor: each check, its fix, secrets, and a backend that hangs."""

import json
import time

import pytest

from polyreme.recipes import doctor
from polyreme.recipes.doctor import Check, as_json, as_text, mask
from polyreme.utils import check

# the code under test starts them
pytestmark = pytest.mark.process


@pytest.fixture
def quick_devices(monkeypatch):
    answer = '{"platform": "cpu", "kind": "cpu", "count": 8, "memory_bytes": null, "answer": 8.0}'
    monkeypatch.setattr(doctor, "_ASK_DEVICES", f"print({answer!r})")


def find(checks, name):
    return next(check for check in checks if check.name == name)


def test_this_machine_is_ready(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_verysecret")
    monkeypatch.setenv("POLYREME_PROXY", "http://me:pass@host:1/")
    checks = doctor.examine()
    assert not any(check.is_failure for check in checks), as_text(checks)
    assert find(checks, "devices").finding == "8 x cpu (cpu)"  # CPU_NUM=8, from conftest
    text = as_text(checks) + as_json(checks)
    assert "HF_TOKEN=***" in text
    assert "http://***@host:1/" in text
    assert "verysecret" not in text
    assert "me:pass" not in text
    assert as_text(checks).endswith("ready")
    assert json.loads(as_json(checks))["ok"] is True


def test_paddles_own_check_says_the_same(monkeypatch, quick_devices, capsys):
    check.run_check()
    assert capsys.readouterr().out.endswith("polyreme is installed and works.\n")
    monkeypatch.setattr(doctor, "_ASK_DEVICES", "raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"run_check: devices.* failed; the lines above say how to mend it"):
        check.run_check()
    assert "devices" in capsys.readouterr().out


def test_backend_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "_ASK_DEVICES", "import time; time.sleep(60)")
    start = time.monotonic()
    check = find(doctor.examine(timeout=0.5), "devices")
    assert time.monotonic() - start < 10
    assert check.is_failure
    assert check.finding == "no answer in 0.5 s"
    assert "JAX_PLATFORMS=cpu" in check.fix


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise RuntimeError('no such platform')", "RuntimeError: no such platform"),
        ("import os; os._exit(9)", "exit code 9"),
        ("import os; os.abort()", "exit code -6"),
        (
            """print('{"platform":"x","kind":"y","count":1,"memory_bytes":2048,"answer":7.0}')""",
            "1 x x (y, 2.0 KiB each): 8 x 1 x 1 gave 7.0",
        ),
        ("print('hello')", "unreadable answer: hello"),
    ],
)
def test_broken_backends(monkeypatch, code, found):
    monkeypatch.setattr(doctor, "_ASK_DEVICES", code)
    check = find(doctor.examine(), "devices")
    assert check.is_failure
    assert check.finding == found


def test_cache_that_cannot_be_written(monkeypatch, quick_devices, tmp_path):
    (tmp_path / "cache").write_text("a file in the way")
    monkeypatch.setenv("POLYREME_COMPILE_CACHE", str(tmp_path / "cache"))
    check = find(doctor.examine(), "compile cache")
    assert check.is_failure
    assert "POLYREME_COMPILE_CACHE" in check.fix
    monkeypatch.setenv("POLYREME_COMPILE_CACHE", "0")
    assert find(doctor.examine(), "compile cache").is_ok


def test_missing_and_old_packages(monkeypatch, quick_devices):
    versions = {"jax": "0.4.1", "pillow": None, "safetensors": None}
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: versions[name] if name in versions else real(name))
    checks = doctor.examine()
    assert find(checks, "jax").finding == "0.4.1 is older than 0.10.2"
    assert find(checks, "safetensors").is_failure
    pillow = find(checks, "pillow")
    assert not pillow.is_ok
    assert not pillow.is_failure  # only an extra
    assert pillow.fix == "pip install polyreme[vision]"
    text = as_text(checks)
    assert "FAIL jax" in text
    assert "fix: pip install --upgrade jax" in text
    assert text.endswith("checks failed")


def test_bad_environment_is_found(monkeypatch, quick_devices):
    monkeypatch.setenv("CPU_NUM", "many")
    check = find(doctor.examine(), "environment")
    assert check.is_failure
    assert "CPU_NUM='many'" in check.finding


def test_little_memory_disk_and_shared_memory(monkeypatch, quick_devices):
    for name in ("_MIN_MEMORY_BYTES", "_MIN_DISK_BYTES", "_MIN_SHM_BYTES"):
        monkeypatch.setattr(doctor, name, 1 << 60)
    checks = doctor.examine()
    for name in ("memory", "disk", "shared memory"):
        assert find(checks, name).is_failure
        assert find(checks, name).fix


def test_secrets_are_masked():
    for name in ("HF_TOKEN", "API_KEY", "x_secret", "DB_PASSWORD", "AWS_CREDENTIALS"):
        assert mask(name, "abc") == "***"
    assert mask("POLYREME_URL", "see https://u:p@h/x and http://h/y") == "see https://***@h/x and http://h/y"


def test_text_lines_up():
    checks = [
        Check("a", True, "1"),
        Check("long", False, "2", "mend it"),
        Check("c", False, "3", "", is_required=False),
    ]
    assert as_text(checks).splitlines() == [
        "ok   a     1",
        "FAIL long  2",
        "           fix: mend it",
        "-    c     3",
        "1 of 3 checks failed",
    ]
