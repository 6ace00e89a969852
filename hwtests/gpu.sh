#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one call. Builds nothing: it takes a release binary that was built
# elsewhere (x86-64, glibc) and the Python of the machine (torch, cupy).
#
#   OUT=results FIXTURES=../shared/fixtures hwtests/gpu.sh [STEP...]
#
# Steps, in this order, all of them by default; each has a limit in seconds and a log, and the next one runs whatever
# became of it: devices conformance golden step peers profile others report. What comes out is in $OUT
# (default target/gpu). Exit code 1 if a step failed, 3 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
mixfleet=${MIXFLEET:-target/release/mixfleet}
fixtures=${FIXTURES:-../shared/fixtures}
python=${PYTHON:-python3}
out=${OUT:-target/gpu}
device=${DEVICE:-cuda:0}
all="devices conformance golden step peers profile others report"
failed=()

if [ ! -x "$mixfleet" ]; then
    echo "gpu.sh: there is no binary at $mixfleet; build it with 'cargo build --release -p mixfleet' or set MIXFLEET" >&2
    exit 3
fi
mkdir -p "$out"
if ! "$mixfleet" devices --json >"$out/devices.json" 2>"$out/devices.log" || ! grep -q '"id": "cuda' "$out/devices.json"; then
    echo "gpu.sh: mixfleet finds no CUDA device here:" >&2
    "$mixfleet" devices >&2
    exit 3
fi

# limit NAME COMMAND...: runs it, keeps its log, says how it ended.
limited() {
    local limit_s=$1 name=$2 begin=$SECONDS rc
    shift 2
    timeout "$limit_s" "$@" >"$out/$name.log" 2>&1
    rc=$?
    printf '%-12s rc %-3s %4s s\n' "$name" "$rc" "$((SECONDS - begin))"
    if [ "$rc" -ne 0 ]; then
        failed+=("$name")
        tail -n 15 "$out/$name.log" | sed 's/^/    /'
    fi
}

step_devices() {
    nvidia-smi >"$out/nvidia-smi.txt" 2>&1
    limited 30 devices "$mixfleet" devices
    limited 30 topo "$mixfleet" topo
}

step_conformance() {
    limited 150 conformance "$mixfleet" validate --device "$device" --level 1 --out "$out/validation"
}

step_golden() {
    limited 90 golden "$python" hwtests/golden.py --mixfleet "$mixfleet" --fixtures "$fixtures" cuda cuda,cpu cpu,cuda
}

# a whole decode step of Llama-3.1-8B's shape, replayed from a recording
step_step() {
    limited 90 step "$mixfleet" profile --device "$device" --only step --model llama-3.1-8b --out "$out/step.json"
}

step_peers() {
    limited 200 peers "$python" hwtests/gpu/peers.py --out "$out/peers.json"
}

step_profile() {
    limited 330 profile "$mixfleet" profile --device "$device" --out "$out/profile.json" --html "$out/profile.html"
}

step_others() {
    local other
    for other in wgpu opencl; do
        if grep -q "\"id\": \"$other" "$out/devices.json"; then
            limited 90 "profile-$other" "$mixfleet" profile --device "$other" --quick --out "$out/profile-$other.json"
        else
            echo "SKIPPED: $other: no device of it here"
        fi
    done
}

step_report() {
    limited 20 report "$python" hwtests/gpu/report.py "$out"
    cat "$out/report.log"
}

for step in ${*:-$all}; do
    case " $all " in
        *" $step "*) "step_$step" ;;
        *) echo "gpu.sh: there is no step '$step'; there are: $all" >&2; exit 2 ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
