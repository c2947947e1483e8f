"""CPU time of processes, in seconds of user and system together."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path


def group_cpu(group: int) -> dict[str, float]:
    """That of a server's process group by process, ended children with their parents.

    A stub has the name of its model; what is none counts as tritonserver.
    """
    seconds: dict[str, float] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # After the name, which may hold anything: state, parent, group, ...
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has ended meanwhile
            continue
        if int(fields[2]) == group:
            found = re.search(r"/([^/\0]+)/\d+/model\.py", command)
            ticks = sum(map(int, fields[11:15]))
            seconds[found[1] if found else "tritonserver"] = ticks / os.sysconf("SC_CLK_TCK")
    return seconds


def own_cpu() -> float:
    """That of this process."""
    return _used(resource.RUSAGE_SELF)


def ended_cpu() -> float:
    """That of the processes that this one started and that have ended."""
    return _used(resource.RUSAGE_CHILDREN)


def _used(whose: int) -> float:
    used = resource.getrusage(whose)
    return used.ru_utime + used.ru_stime
