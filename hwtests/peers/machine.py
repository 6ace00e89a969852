"""What the machine does besides the measurement, from /proc (Linux)."""

import contextlib
import dataclasses
import os
import pathlib
import resource
import time

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass
class Usage:
    """What a stretch of time cost. `others` and `stolen` are in cores."""

    wall_s: float = 0.0
    others: float = 0.0
    stolen: float = 0.0


def load_average():
    """Runnable tasks, mean over the last minute."""
    return os.getloadavg()[0]


def description():
    """Processor, cores, memory and kernel, one line."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        "unknown processor",
    )
    total_kib = next(int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal"))
    return f"{cpu}, {os.cpu_count()} cores, {total_kib / 2**20:.1f} GiB, Linux {os.uname().release}"


def memory_bytes(pid):
    """Resident memory of a process now (`VmRSS` and its parts) and at its highest (`VmHWM`)."""
    wanted = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmHWM")
    fields = (line.split() for line in _lines(f"/proc/{pid}/status"))
    return {f[0][:-1]: int(f[1]) * 1024 for f in fields if f and f[0][:-1] in wanted}


@contextlib.contextmanager
def watched():
    """Yields a `Usage`, complete when the block ends; the processes that it started must have ended too."""
    usage = Usage()
    before = time.monotonic(), *_busy_and_stolen_s(), _ours_s()
    yield usage
    after = time.monotonic(), *_busy_and_stolen_s(), _ours_s()
    usage.wall_s, busy_s, stolen_s, ours_s = (b - a for a, b in zip(before, after))
    usage.others = max(0.0, (busy_s - ours_s) / usage.wall_s)
    usage.stolen = stolen_s / usage.wall_s


def _lines(path):
    return pathlib.Path(path).read_text().splitlines()


def _busy_and_stolen_s():
    user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, _lines("/proc/stat")[0].split()[1:9])
    return (user + nice + system + irq + softirq) / TICKS_PER_S, stolen / TICKS_PER_S


def _ours_s():
    kinds = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, kinds))
