"""Becomes the program named on its command line, which then ends when the launcher ends.

Run as a script, with nothing of the package imported: `child.py LAUNCHER_PID PROGRAM ARGUMENT...`.
A step of its own, as running Python code between fork and exec is unsafe in a process with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, program = int(sys.argv[1]), sys.argv[2]
    # Survives exec. SIGTERM, so that a server whose launcher was killed still stops in order.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != launcher:
        sys.exit("the launcher ended before the server was started")
    os.execv(program, sys.argv[2:])


if __name__ == "__main__":
    main()
