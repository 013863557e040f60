"""The share of the public interface whose types pyright knows: python -m tools.check_types; exits 1 below LEAST.

Run by `make types` in an environment that has polyreme and pyright; takes a minute.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

LEAST = 0.95
SHOWN = 15  # modules with most symbols that are not known


def main() -> int:
    """Prints the score and where it is lost."""
    command = [sys.executable, "-m", "pyright", "--verifytypes", "polyreme", "--ignoreexternal", "--outputjson"]
    # with --verifytypes pyright looks for the package with the first python of the path, not with --pythonpath
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path})
    try:
        report = json.loads(done.stdout)["typeCompleteness"]
    except (json.JSONDecodeError, KeyError):
        print(done.stdout[-2000:], done.stderr[-2000:])
        return 2
    unknown = [s["name"] for s in report["symbols"] if s["isExported"] and not s["isTypeKnown"]]
    for module, count in Counter(".".join(name.split(".")[:3]) for name in unknown).most_common(SHOWN):
        print(f"{count:5} {module}")
    score = report["completenessScore"]
    print(f"{score:.1%} of the public interface is typed, {LEAST:.0%} is what it must be")
    return 0 if score >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
