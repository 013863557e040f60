"""The chain of docs/suite.md runs as it stands there, and its links agree."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")

ROOT = Path(__file__).parents[1]
FIRST = re.search(r"```sh\n(.*?)```", (ROOT / "docs/suite.md").read_text(encoding="utf-8"), re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1800)  # minutes on a quiet machine
def test_the_chain_runs_from_text_to_an_endpoint(tmp_path):
    for name in ("configs", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script = "set -e\ntrap 'kill $(jobs -p) 2>/dev/null' EXIT\n" + FIRST.group(1).replace("8000", port)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "CPU_NUM")}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment | {"PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "runs/suite/results.jsonl").read_text().splitlines()]
    whole, small, served = (rows[i : i + 2] for i in (0, 2, 4))
    # trained on this text: far below the ln 1024 = 6.9 of a model that knows nothing
    assert whole[0]["nats_per_token"] < 5
    assert small[0]["nats_per_token"] == pytest.approx(whole[0]["nats_per_token"], abs=0.05)
    assert [{**row, "model": None} for row in served] == [{**row, "model": None} for row in small]
    # the server's own words may stand behind it on the line
    answer, _ = json.JSONDecoder().raw_decode(done.stdout[done.stdout.rindex('{"id"') :])
    assert answer["choices"][0]["message"]["content"].strip()
