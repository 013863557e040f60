"""Becomes a worker that dies with its launcher: python exec_worker.py LAUNCHER_PID COMMAND...

Run as a file of its own, before anything is imported: the kernel's request survives exec, and asking for it
between fork and exec of a launcher with threads would not be safe.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # prctl(2)


def main() -> None:
    """Ask the kernel for SIGKILL when the launcher is gone, then become the command."""
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it was gone before the kernel was asked
        sys.exit(128 + signal.SIGKILL)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
