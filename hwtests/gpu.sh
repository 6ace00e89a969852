#!/usr/bin/env bash
# Runs everything that needs an NVIDIA GPU, in three calls of less than ten minutes each. Builds nothing: it
# runs in a folder with the binary and all required files.
#
#   hwtests/gpu.sh pack DIR      makes that folder, on any machine (MIXFLEET names the binary; else it is built)
#   DIR/hwtests/gpu.sh 1         devices conformance sanitizer golden
#   DIR/hwtests/gpu.sh 2         peers goals
#   DIR/hwtests/gpu.sh 3         profile decode report
#   DIR/hwtests/gpu.sh STEP...   some steps; beside those above: links others members
#   hwtests/gpu.sh plan          the steps of each call and their limits in seconds
#
# A call ends with one archive, $OUT/gpu-CALL.tar.gz, which is written after each step, and every few seconds
# between: it is there however the call ends. `hwtests/gpu/report.py gpu-*.tar.gz` makes the tables of docs/results/cuda.md.
# What cannot be run here is skipped, which is said and recorded. Relative paths are from the folder above hwtests.
# Exit code: 0 all passed, 1 a step failed, 2 usage, 3 no GPU or no binary, 143 ended from outside.
#
#   OUT=DIR            where archives go (default: out beside the binary, or target/gpu)
#   RAW=DIR            where steps write (default: mixfleet-gpu in the directory for temporary files)
#   MIXFLEET, FIXTURES, PYTHON, SANITIZER   the binary, the checkpoints, a Python with torch, compute-sanitizer, where
#                      they are not found
#   LIMIT_S=570        time of a call; what is left of it limits its steps
#   ARCHIVE_EVERY_S=15 time between archives while a step runs
# and for a device slower than a GPU, such as the tests' driver in host memory:
#   CONFORMANCE, SANITIZED (cases of `validate --only`), GOLDEN (placements), GOALS (points), PROFILE (options),
#   DECODE_MODEL, DECODE_BATCHES, DECODE_PROMPT, DECODE_TOKENS, DECODE_KV_GIB, VALIDATE_TIMEOUT
# and for a machine with several GPUs: MEMBERS=tp:cuda:0,cuda:1
set -uo pipefail
script=$(cd "$(dirname "$0")" && pwd)/$(basename "$0")
cd "$(dirname "$script")/.." || exit 3

device=${DEVICE:-cuda:0}
if [ -e mixfleet ]; then
    mixfleet=${MIXFLEET:-$PWD/mixfleet} fixtures=${FIXTURES:-fixtures} out=${OUT:-out}
else
    mixfleet=${MIXFLEET:-target/release/mixfleet} fixtures=${FIXTURES:-../shared/fixtures} out=${OUT:-target/gpu}
fi
raw=${RAW:-${TMPDIR:-/tmp}/mixfleet-gpu}
limit_s=${LIMIT_S:-570}

# The steps of a call, each with its limit in seconds. Each sum leaves a call time to end.
steps_of() {
    case $1 in
        1) echo "devices:20 conformance:180 sanitizer:240 golden:100" ;;
        2) echo "peers:240 goals:300" ;;
        3) echo "profile:310 decode:200 report:20" ;;
        more) echo "links:60 others:180 members:240" ;;
    esac
}

die() {
    echo "gpu.sh: $2" >&2
    exit "$1"
}

# hard_links BINARY: the libraries that a binary of all features does not start without.
hard_links() {
    ldd "$1" 2>/dev/null | grep -oE 'lib(OpenCL|ibverbs|hwloc)\.so[^ ]*( => not found)?'
}

pack() {
    local to=$1 binary=${MIXFLEET:-} fixture said
    if [ -z "$binary" ]; then
        cargo build --release --locked -p mixfleet || die 3 "the binary cannot be built"
        binary=${CARGO_TARGET_DIR:-target}/release/mixfleet
    fi
    [ -z "$(hard_links "$binary")" ] || die 3 "$binary is not of the default features, since it needs
$(hard_links "$binary")
Build it with 'cargo build --release -p mixfleet'."
    mkdir -p "$to/fixtures" "$to/hwtests/gpu" || exit 3
    cp "$binary" "$to/mixfleet" || exit 3
    strip "$to/mixfleet" 2>/dev/null || echo "gpu.sh: the binary is not stripped" >&2
    cp hwtests/gpu.sh hwtests/golden.py "$to/hwtests/" || exit 3
    cp hwtests/gpu/*.py "$to/hwtests/gpu/" || exit 3
    for fixture in "$fixtures"/*/golden.json; do
        fixture=$(dirname "$fixture")
        # a family that is not served is refused before a device is opened
        said=$("$to/mixfleet" generate --model "$fixture" --device none --prompt-ids 1 2>&1)
        case $said in *"unknown device 'none'"*) cp -r --no-preserve=mode "$fixture" "$to/fixtures/" ;; esac
    done
    [ -n "$(ls "$to/fixtures")" ] || die 3 "there are no checkpoints in $fixtures; name their folder with FIXTURES"
    echo "$to: $(du -sm "$to" | cut -f1) MB, including the binary $(du -sm "$to/mixfleet" | cut -f1) MB and" \
        "$(ls "$to/fixtures" | wc -l) checkpoints; run its hwtests/gpu.sh 1, 2 and 3 where the GPU is"
}

# ---- the machine

# A Python, one with torch if there is any.
find_python() {
    local one first=
    for one in ${PYTHON:-} python3 python /opt/*/bin/python3 /opt/*/.venv/bin/python3 /opt/*/*/bin/python3; do
        "$one" -c '' 2>/dev/null || continue
        first=${first:-$one}
        if "$one" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))'; then
            echo "$one"
            return
        fi
    done
    echo "$first"
}

# The directories of NVIDIA's wheels in the Python's packages, of CUDA 12 and of 13.
wheel_libraries() {
    "$python" -c 'import glob, os, sys
found = [d for p in sys.path for d in sorted(glob.glob(os.path.join(p, "nvidia", "*", "lib")))]
print(":".join(dict.fromkeys(found)))'
}

find_libraries() {
    local directory wheels=
    [ -z "$python" ] || wheels=$(wheel_libraries)
    wheels=${MIXFLEET_CUDA_LIBRARIES:-}${MIXFLEET_CUDA_LIBRARIES:+:}$wheels
    export MIXFLEET_CUDA_LIBRARIES=${wheels%:}
    # other programs, and NVML, know nothing of that variable
    for directory in /usr/local/nvidia/lib64 /usr/lib/wsl/lib; do
        if [ -e "$directory/libcuda.so.1" ] && ! ldconfig -p 2>/dev/null | grep -q 'libcuda\.so\.1'; then
            export LD_LIBRARY_PATH=$directory${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
        fi
    done
}

find_sanitizer() {
    local one
    for one in ${SANITIZER:-} compute-sanitizer "${CUDA_HOME:-/usr/local/cuda}"/bin/compute-sanitizer \
        "${CUDA_HOME:-/usr/local/cuda}"/compute-sanitizer/compute-sanitizer \
        /usr/local/cuda*/bin/compute-sanitizer /opt/*/bin/compute-sanitizer; do
        command -v "$one" 2>/dev/null && return
    done
}

# ---- running

running= running_signal= running_name=

# Replaces the archive. Files that are being written are included as far as they are complete.
archive() {
    local part="$out/.gpu-$call.$BASHPID"
    tar -C "$raw" --exclude=./cache -czf "$part" . 2>/dev/null
    mv -f "$part" "$out/gpu-$call.tar.gz"
}

# record STEP STATE SECONDS [WORDS]
record() {
    printf '%s\t%s\t%s\t%s\n' "$1" "$2" "$3" "${4:-}" >>"$raw/steps.tsv"
    printf '%-22s %-8s %4s s  %s\n' "$1" "$2" "$3" "${4:-}"
}

skip() {
    record "$1" skipped 0 "$2"
    echo "SKIPPED: $1: $2"
}

ended() {
    trap '' TERM INT HUP
    [ -z "${archiver:-}" ] || kill "$archiver" 2>/dev/null
    [ -z "$running_name" ] || record "$running_name" cut "$((SECONDS - step_began))" "the call was ended from outside"
    archive
    if [ -n "$running" ]; then
        kill -s "$running_signal" "$running" 2>/dev/null
        for _ in 1 2 3 4 5 6 7 8; do
            kill -0 "$running" 2>/dev/null || break
            sleep 0.5
        done
        kill -s KILL -- "-$running" 2>/dev/null # `timeout` leads a group of its own
        archive
    fi
    exit 143
}

# limited LIMIT_S NAME COMMAND...: runs it within the rest of the call's time, keeps its log, records how it
# ended. STOP is the signal at the limit: a profile writes its results so far when it is interrupted.
limited() {
    local most=$1 name=$2 left=$((limit_s - SECONDS)) rc state
    shift 2
    [ "$most" -le "$left" ] || most=$left
    if [ "$most" -lt 1 ]; then
        record "$name" cut 0 "no time was left of the call"
        failed=1
        return 1
    fi
    step_began=$SECONDS running_name=$name running_signal=${STOP:-TERM}
    timeout -k 10 -s "$running_signal" "$most" "$@" >"$raw/$name.log" 2>&1 &
    running=$!
    wait "$running"
    rc=$?
    running= running_name=
    case $rc in
        0) state=passed ;;
        124 | 137) state=cut ;;
        *) state=failed ;;
    esac
    local words=
    [ "$state" != cut ] || words="after its limit of $most s"
    [ "$state" != failed ] || words="exit code $rc"
    record "$name" "$state" "$((SECONDS - step_began))" "$words"
    if [ "$state" != passed ]; then
        failed=1
        tail -n 15 "$raw/$name.log" | sed 's/^/    /'
    fi
    archive
    [ "$state" = passed ]
}

# ---- the steps; each gets its limit in seconds

step_devices() {
    nvidia-smi >"$raw/nvidia-smi.txt" 2>&1
    nvidia-smi -q >"$raw/nvidia-smi-q.txt" 2>&1
    printf '%s\n' "$python" "$MIXFLEET_CUDA_LIBRARIES" >"$raw/python.txt"
    limited "$1" devices "$mixfleet" devices
    cat "$raw/devices.log"
}

step_conformance() {
    rm -rf "$raw/validation" # of an earlier try, which `validate` would not write over
    limited "$1" conformance "$mixfleet" validate --device "$device" --level 1 ${CONFORMANCE:+--only "$CONFORMANCE"} \
        --timeout "${VALIDATE_TIMEOUT:-30s}" --out "$raw/validation"
}

# The emulator of the tests runs threads in an order, and so sees no race: attention first, then products. Each run
# gets its share of the time that is left.
step_sanitizer() {
    local sanitizer tool cases name end=$((SECONDS + $1)) left=6 word
    sanitizer=$(find_sanitizer)
    if [ -z "$sanitizer" ]; then
        skip sanitizer "there is no compute-sanitizer here; name it with SANITIZER"
        return
    fi
    for cases in ${SANITIZED:-l1.attn_decode,l1.attn_prefill,l1.attn_merge l1.gemm}; do
        for tool in racecheck memcheck synccheck; do
            word=${cases%%,*} word=${word#l1.}
            name=sanitizer-$tool-${word%%_*}
            rm -rf "${raw:?}/$name"
            limited $(((end - SECONDS) / left)) "$name" "$sanitizer" --tool "$tool" --target-processes all \
                --error-exitcode 9 "$mixfleet" validate --device "$device" --level 1 --only "$cases" \
                --timeout "${VALIDATE_TIMEOUT:-300s}" --out "$raw/$name"
            left=$((left > 1 ? left - 1 : 1))
            if grep -q "Device not supported" "$raw/$name.log"; then
                skip sanitizer "compute-sanitizer refuses this device"
                return
            fi
            grep -hE '(ERROR|RACECHECK) SUMMARY' "$raw/$name.log" | sort | uniq -c
            # an error in a child does not always reach the exit code
            if grep -E '(ERROR|RACECHECK) SUMMARY' "$raw/$name.log" | grep -qvE 'SUMMARY: 0 '; then
                record "$name" failed 0 "it found errors: see $name.log"
                failed=1
            fi
        done
    done
}

step_golden() {
    [ -n "$python" ] || { skip golden "there is no Python"; return; }
    # shellcheck disable=SC2086 # placements are words
    limited "$1" golden "$python" hwtests/golden.py --mixfleet "$mixfleet" --fixtures "$fixtures" \
        ${GOLDEN:-cuda cuda,cpu cpu,cuda}
    tail -n 2 "$raw/golden.log"
}

step_peers() {
    if [ -z "$python" ] || ! timeout 60 "$python" -c 'import torch' 2>"$raw/peers.log"; then
        skip peers "${python:-no Python}: torch cannot be imported"
        return
    fi
    limited "$1" peers "$python" hwtests/gpu/peers.py --out "$raw/peers.jsonl"
}

# the points that the goals are about
step_goals() {
    local points="memory_read.1GiB,attn_decode.bf16.b32.c16384.gqa8,attn_decode.bf16.b1.c16384.gqa8"
    points="$points,attn_prefill.bf16.t8192.c0.gqa4,attn_prefill.bf16.t2048.c0.gqa4"
    points="$points,gemm.bf16.m*.n4096.k4096,gemm.bf16.m*.n14336.k4096,gemm.bf16.m8192.n4096.k4096"
    STOP=INT limited "$1" goals "$mixfleet" profile --device "$device" --only "${GOALS:-$points}" \
        --out "$raw/goals.json"
}

step_profile() {
    # shellcheck disable=SC2086 # options are words
    STOP=INT limited "$1" profile "$mixfleet" profile --device "$device" ${PROFILE:-} --out "$raw/profile.json" \
        --html "$raw/profile.html"
}

# runs DEVICE TEMPERATURE TOKENS: decodes on it of a model of random weights, which the device fills. The largest batch
# comes first, so that all share an engine.
runs() {
    local batch ids
    ids=$(seq -s, 5 $((${DECODE_PROMPT:-512} + 4)))
    for batch in ${DECODE_BATCHES:-64 8 1}; do
        printf '["--model","%s","--device","%s","--prompt-ids","%s","--max-tokens","%s","--batch","%s",' \
            "${DECODE_MODEL:-random:llama-3.1-8b}" "$1" "$ids" "$3" "$batch"
        printf '"--temperature","%s","--kv-memory","%s","--ignore-eos"]\n' "$2" "${DECODE_KV_GIB:-8}"
    done
}

step_decode() {
    local temperature name
    for name in greedy sampled; do
        temperature=0
        [ $name = greedy ] || temperature=1
        runs "$device" $temperature "${DECODE_TOKENS:-384}" >"$raw/decode-$name.runs"
        echo "${DECODE_MODEL:-random:llama-3.1-8b}" >"$raw/decode-model.txt"
        limited $(($1 / 2)) "decode-$name" "$mixfleet" generate --each "$raw/decode-$name.runs"
    done
}

# Two members on one GPU (`cuda` and `cuda:0` are one), or on those that MEMBERS names, beside one device: the
# time of exchanges between members, and whether their tokens are the golden ones.
step_members() {
    local members=${MEMBERS:-tp:cuda,cuda:0} one
    if [ -n "$python" ]; then
        limited $(($1 / 3)) members-golden "$python" hwtests/golden.py --mixfleet "$mixfleet" --fixtures "$fixtures" \
            "$members"
        tail -n 2 "$raw/members-golden.log"
    else
        skip members-golden "there is no Python"
    fi
    for one in "$device" "$members"; do
        runs "$one" 0 $((${DECODE_TOKENS:-384} / 3))
    done >"$raw/members.runs"
    limited $(($1 * 2 / 3)) members "$mixfleet" generate --each "$raw/members.runs"
}

step_report() {
    [ -n "$python" ] || { skip report "there is no Python"; return; }
    limited "$1" report "$python" hwtests/gpu/report.py "$raw"
    cp "$raw/report.log" "$raw/report.md"
    cat "$raw/report.md"
}

# rates of copies with ordinary and with pinned memory of the host
step_links() {
    limited "$1" links "$mixfleet" profile --links
}

step_others() {
    local other
    for other in wgpu opencl; do
        if grep -q "\"id\": \"$other" "$raw/devices.json"; then
            STOP=INT limited $(($1 / 2)) "profile-$other" "$mixfleet" profile --device "$other" --quick \
                --out "$raw/profile-$other.json"
        else
            skip "profile-$other" "no such device here"
        fi
    done
}

# ---- a call

case ${1:-} in
    pack) [ $# -eq 2 ] || die 2 "usage: gpu.sh pack DIR"; pack "$2"; exit ;;
    plan)
        for call in 1 2 3 more; do
            for step in $(steps_of $call); do echo "$call ${step/:/ }"; done
        done
        exit
        ;;
    1 | 2 | 3) call=$1 steps=$(steps_of "$1") ;;
    "") die 2 "name a call (1, 2, 3), steps, 'plan', or 'pack DIR'; the first lines of $script say more" ;;
    *)
        call=steps steps=
        for wanted; do
            known=$(for call_of in 1 2 3 more; do steps_of $call_of; done | tr ' ' '\n' | grep "^$wanted:")
            [ -n "$known" ] || die 2 "there is no step '$wanted'; 'gpu.sh plan' lists them"
            steps="$steps $known"
        done
        ;;
esac

[ -x "$mixfleet" ] || die 3 "there is no binary at $mixfleet; 'gpu.sh pack DIR' makes a folder with it, or set MIXFLEET"
needed=$(hard_links "$mixfleet")
if [ -n "$needed" ]; then
    echo "gpu.sh: $mixfleet is of all features and needs these, so that another machine may not start it:" $needed
    case $needed in *"not found"*) die 3 "build it with 'cargo build --release -p mixfleet'" ;; esac
fi
mkdir -p "$out" "$raw/cache" || die 3 "cannot write to $out and $raw"
out=$(cd "$out" && pwd) raw=$(cd "$raw" && pwd)
[ "$call" != 1 ] || rm -f "$raw/steps.tsv"
touch "$raw/steps.tsv"
earlier=$(wc -l <"$raw/steps.tsv")
export XDG_CACHE_HOME=$raw/cache # calibrations and compiled kernels of this machine alone
failed=0
python=$(find_python)
find_libraries
trap ended TERM INT HUP
"$mixfleet" devices --json >"$raw/devices.json" 2>"$raw/devices.err"
if ! grep -q '"id": "cuda' "$raw/devices.json"; then
    "$mixfleet" devices >&2
    archive
    die 3 "mixfleet finds no CUDA device here; libraries were looked for in '$MIXFLEET_CUDA_LIBRARIES'"
fi
(
    # ends with the call, however that ends
    while kill -0 $$ 2>/dev/null; do
        sleep "${ARCHIVE_EVERY_S:-15}"
        kill -0 $$ 2>/dev/null && archive
    done
) >/dev/null 2>&1 &
archiver=$!
for step in $steps; do
    "step_${step%:*}" "${step#*:}"
done
kill "$archiver" 2>/dev/null
wait "$archiver" 2>/dev/null
archive
rm -f "$out"/.gpu-*
echo "$out/gpu-$call.tar.gz has the results"
tail -n "+$((earlier + 1))" "$raw/steps.tsv" | grep -E '	(failed|cut|skipped)	' | cut -f1,2 | sed 's/^/gpu.sh: /'
exit $failed
