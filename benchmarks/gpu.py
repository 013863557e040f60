"""Every GPU table in one go, each part in a process of its own with its own time limit; a part that fails is passed.

    python benchmarks/gpu.py OUT [part=seconds ...]

Writes OUT/lines.jsonl (what the parts print as JSON), OUT/PART.log (all else they print) and the machine's facts.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
PARTS = {
    "gpt": [HERE / "gpu_gpt.py"],
    "gpt-half": [HERE / "gpu_gpt.py", "--layers=12"],
    "attention": [HERE / "gpu_ops.py", "attention"],
    "columns": [HERE / "gpu_ops.py", "columns"],
    "grouped": [HERE / "gpu_ops.py", "grouped"],
    "loss": [HERE / "gpu_ops.py", "loss"],
    "decode": [HERE / "gpu_decode.py"],
}


def run(name: str, command: list[str], limit: float, out: Path) -> dict:
    """Run a part, which is ended with its children at the limit -> its line."""
    paths = os.pathsep.join(p for p in (str(HERE.parent), os.environ.get("PYTHONPATH", "")) if p)
    start = time.perf_counter()
    with (out / f"{name}.log").open("w") as log, (out / f"{name}.out").open("w+") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=log, env=os.environ | {"PYTHONPATH": paths}, start_new_session=True
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = f"over {limit:.0f} s"
        printed.seek(0)
        text = printed.read()
    (out / f"{name}.out").unlink()
    lines = [line for line in text.splitlines() if line.startswith("{")]
    with (out / "lines.jsonl").open("a") as file:
        file.writelines(f"{line}\n" for line in lines)
    for line in lines:
        print(line)
    done = {"done": name, "code": code, "seconds": round(time.perf_counter() - start, 1)}
    if code:
        done["log"] = (out / f"{name}.log").read_text()[-1500:]
    return done


def main() -> None:
    """Run the parts that are named, or all, 60 seconds each."""
    out = Path(sys.argv[1])
    wanted = dict(argument.split("=") for argument in sys.argv[2:]) or dict.fromkeys(PARTS, 60)
    for name, limit in wanted.items():
        print(json.dumps(run(name, [sys.executable, *map(str, PARTS[name])], float(limit), out)), flush=True)


if __name__ == "__main__":
    main()
