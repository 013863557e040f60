"""A SLURM of two nodes on this machine, for tests: munged, slurmctld and a slurmd for each node, on loopback."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from polyreme.distributed.job.rendezvous import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol", "squeue")


def missing_programs() -> list[str]:
    """Those that Debian's slurm-wlm and munge bring and that are not here."""
    return [name for name in PROGRAMS if shutil.which(name, path=_PATH) is None]


_PATH = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin"])


class SlurmCluster:
    """Nodes n1 and n2 of one processor each; the daemons write below folder, and end with close()."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: dict[str, subprocess.Popen] = {}
        host = socket.gethostname()
        ports = [free_port("127.0.0.1", start) for start in (26800, 27100, 27400)]
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": _PATH}
        for name in ("state", "spool-n1", "spool-n2"):
            (folder / name).mkdir()
        settings = {
            "ClusterName": "loopback",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={folder}/munge.socket",
            "SlurmctldPort": str(ports[0]),
            "StateSaveLocation": f"{folder}/state",
            "SlurmdSpoolDir": f"{folder}/spool-%n",
            "SlurmdPidFile": f"{folder}/slurmd-%n.pid",
            "SlurmctldPidFile": f"{folder}/slurmctld.pid",
            "SlurmctldLogFile": f"{folder}/slurmctld.log",
            "SlurmdLogFile": f"{folder}/slurmd-%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "SelectType": "select/linear",
            "MpiDefault": "none",
            "JobCompType": "jobcomp/none",
            "ReturnToService": "2",
            "SlurmdTimeout": "10",
            "KillWait": "5",
            "MinJobAge": "300",
        }
        nodes = [
            f"NodeName=n{at} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for at, port in enumerate(ports[1:], 1)
        ]
        partition = "PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP OverSubscribe=EXCLUSIVE"
        lines = [*(f"{name}={value}" for name, value in settings.items()), *nodes, partition]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        munge = [f"--socket={folder}/munge.socket", f"--key-file={key}", f"--pid-file={folder}/munged.pid"]
        self._start("munged", "--foreground", "--force", *munge, f"--log-file={folder}/munged.log",
                    f"--seed-file={folder}/munged.seed", "--num-threads=2")  # fmt: skip
        self._wait(lambda: (folder / "munge.socket").exists(), "munged")
        self._start("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._start("slurmd", "-D", "-N", node, name=node)
        self._wait(lambda: self.run("sinfo", "-h", "-o", "%D %t").strip() == "2 idle", "nodes")

    def run(self, *words: str) -> str:
        """Standard output of a command of SLURM's."""
        environment = {**os.environ, **self.environment}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=60).stdout

    def lose(self, node: str) -> None:
        """End a node's slurmd and what runs there, as a machine that goes dark."""
        daemon = self._daemons.pop(node)
        daemon.kill()
        daemon.wait()
        self._kill_steps(f"SLURMD_NODENAME={node}\0")

    def close(self) -> None:
        """End what was started."""
        for daemon in reversed(self._daemons.values()):
            daemon.kill()
            daemon.wait()
        self._kill_steps()

    def _kill_steps(self, named: str = "") -> None:
        """Processes of this cluster that daemons started, which outlive them: those with this in their environment."""
        mine = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                told = (process / "environ").read_bytes()
                if named.encode() in told and mine in told:
                    os.kill(int(process.name), signal.SIGKILL)

    def _start(self, program: str, *words: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("wb") as output:
            self._daemons[name or program] = subprocess.Popen(
                [program, *words], env={**os.environ, **self.environment}, stdout=output, stderr=output
            )

    def _wait(self, condition, what: str) -> None:
        end = time.monotonic() + 30
        while not condition():
            if time.monotonic() > end:
                said = [f"{path.name}:\n{path.read_text()[-800:]}" for path in self.folder.glob("*.[lo][ou][gt]")]
                self.close()
                raise RuntimeError(f"{what} did not come:\n" + "\n".join(said))
            time.sleep(0.1)
