#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one call. Builds nothing: it takes a release binary that was built
# elsewhere (x86-64, glibc) and the Python of the machine (torch, cupy).
#
#   OUT=results FIXTURES=../shared/fixtures hwtests/gpu.sh [STEP...]
#
# Steps, in this order, all of them by default; each has a limit in seconds and a log, and the next one runs whatever
# became of it: devices conformance links golden peers goals profile others report. What comes out is in $OUT
# (default target/gpu). One more step is run only when it is named: llama8b makes random weights of that shape with
# MAKE_MODEL (../shared/tools/make_random_model.py), 16 GB, and generates with them.
# Exit code 1 if a step failed, 3 if there is no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
mixfleet=${MIXFLEET:-target/release/mixfleet}
fixtures=${FIXTURES:-../shared/fixtures}
python=${PYTHON:-python3}
out=${OUT:-target/gpu}
device=${DEVICE:-cuda:0}
all="devices conformance links golden peers goals profile others report"
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

# rates of copies with ordinary and with pinned memory of the host
step_links() {
    limited 60 links "$mixfleet" profile --links
    grep -E '^(link|copy) |pinned' "$out/links.log"
}

step_golden() {
    limited 90 golden "$python" hwtests/golden.py --mixfleet "$mixfleet" --fixtures "$fixtures" cuda cuda,cpu cpu,cuda
}

# the points that the goals are about
step_goals() {
    local points="memory_read.1GiB,attn_decode.bf16.b32.c16384.gqa8,attn_decode.bf16.b1.c16384.gqa8"
    points="$points,attn_prefill.bf16.t8192.c0.gqa4,attn_prefill.bf16.t2048.c0.gqa4"
    points="$points,gemm.bf16.m*.n4096.k4096,gemm.bf16.m*.n14336.k4096,gemm.bf16.m8192.n4096.k4096"
    limited 120 goals "$mixfleet" profile --device "$device" --only "$points" --out "$out/goals.json"
}

# whole tokens of a model of Llama-3.1-8B's shape
step_llama8b() {
    local make=${MAKE_MODEL:-../shared/tools/make_random_model.py} model=${MODEL:-target/8b}
    [ -e "$model/model.safetensors" ] || limited 400 make-model "$python" "$make" "$model" --preset 8b --tokenizer "$fixtures/llama-gqa-f32"
    limited 150 llama8b "$mixfleet" generate --model "$model" --device "$device" --prompt-ids 5,6,7,8 --max-tokens 128 --ignore-eos --json
    tail -c 300 "$out/llama8b.log"
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
    case " $all llama8b " in
        *" $step "*) "step_$step" ;;
        *) echo "gpu.sh: there is no step '$step'; there are: $all llama8b" >&2; exit 2 ;;
    esac
done
if [ ${#failed[@]} -gt 0 ]; then
    echo "failed: ${failed[*]}"
    exit 1
fi
