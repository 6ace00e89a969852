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


def measure(program, file):
    arguments = ["generate", "--model", file, "--device", "cpu", "--kv-memory", str(KV_GIB), "--prompt-ids", "1,2,3"]
    arguments += ["--max-tokens", "40", "--ignore-eos"]
    child = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    most, peak = (0, 0), 0
    while child.poll() is None:
        try:
            with open(f"/proc/{child.pid}/status") as lines:
                told = dict(line.split(":", 1) for line in lines)
        except OSError:
            break
        if "RssAnon" in told:
            anonymous, pages, peak = (int(told[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM"))
            # once all weights are there, as much is anonymous as ever
            most = max(most, (anonymous, pages))
        time.sleep(PAUSE_S)
    if child.wait() != 0:
        sys.exit(f"{program} failed with {file}")
    return *most, peak


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    for file in sys.argv[2:]:
        anonymous, pages, peak = measure(sys.argv[1], file)
        size = os.path.getsize(file)
        share = (anonymous + pages - KV_GIB * 2**30) / size
        figures = [f"{value / 1e6:.0f}" for value in (size, anonymous, pages, peak)]
        print(f"{os.path.basename(file)}: file {figures[0]}, anonymous {figures[1]}, pages {figures[2]}, "
              f"without KV {share:.2f} of the file; peak {figures[3]}, {peak / size:.2f} of it", flush=True)


if __name__ == "__main__":
    main()
