"""Starts `mixfleet serve` for the scripts beside it."""

import os
import re
import subprocess
import sys
import tempfile
import time


def serve(model, devices):
    """The process, its address and its log, once it is ready."""
    log = tempfile.NamedTemporaryFile("w+", suffix=".log")
    command = [os.environ["MIXFLEET"], "serve", "--model", model, "--name", "m", "--listen", "127.0.0.1:0"]
    for device in devices:
        command += ["--device", device]
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    for _ in range(1200):
        text = open(log.name).read()
        ready = re.search(r"ready: (http://\S+)/v1", text)
        if ready:
            return process, ready.group(1), log
        if process.poll() is not None:
            sys.exit(text)
        time.sleep(0.1)
    sys.exit(f"not ready in two minutes: {text}")
