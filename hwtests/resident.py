#!/usr/bin/env python3
"""Memory of a process that generates from quantised files, beside their size.

hwtests/resident.py target/release/mixfleet FILE.gguf...

Prints, in MB, the file, what is resident while tokens are generated (anonymous, and pages of the program and of the
file), the same without KV over the file, and the peak, which has the pages of the file that is read.
"""

import os
import subprocess
import sys
import time

KV_GIB = 0.03125
PAUSE_S = 0.1
KEYS = ("RssAnon", "RssFile", "VmHWM")


def told(pid):
    """What the kernel says of a process, in bytes; nothing once it is ending."""
    try:
        with open(f"/proc/{pid}/status") as lines:
            fields = dict(line.split(":", 1) for line in lines)
    except OSError:
        return {}
    return {key: int(fields[key].split()[0]) * 1024 for key in KEYS if key in fields}


def measure(program, file):
    arguments = ["generate", "--model", file, "--device", "cpu", "--kv-memory", str(KV_GIB), "--prompt-ids", "1,2,3"]
    arguments += ["--max-tokens", "40", "--ignore-eos"]
    child = subprocess.Popen([program, *arguments], stdout=subprocess.PIPE)
    # all weights are placed once there is a token; a sample before has what loading needs beside them
    child.stdout.read(1)
    samples = []
    while child.poll() is None:
        sample = told(child.pid)
        if len(sample) == len(KEYS):
            samples.append([sample[key] for key in KEYS])
        time.sleep(PAUSE_S)
    if child.wait() != 0 or not samples:
        sys.exit(f"{program} failed with {file}")
    return max(samples, key=lambda sample: sample[0] + sample[1])


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for needed in sys.argv[1:]:
        if not os.path.isfile(needed):
            sys.exit(f"there is no file {needed}; build the program with: cargo build --release -p mixfleet")
    for file in sys.argv[2:]:
        anonymous, pages, peak = measure(sys.argv[1], file)
        size = os.path.getsize(file)
        share = (anonymous + pages - KV_GIB * 2**30) / size
        figures = [f"{value / 1e6:.0f}" for value in (size, anonymous, pages, peak)]
        print(f"{os.path.basename(file)}: file {figures[0]}, anonymous {figures[1]}, pages {figures[2]}, "
              f"without KV {share:.2f} of the file; peak {figures[3]}, {peak / size:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
