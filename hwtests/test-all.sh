#!/usr/bin/env bash
# Everything that can be tested without special hardware: format, lints, all tests with every backend
# that a CPU can stand in for, docs. Installs the system packages that it needs (Debian, Ubuntu).
set -euo pipefail
cd "$(dirname "$0")/.."

# OpenCL's loader to link against, and PoCL, which runs OpenCL on the CPU.
packages="ocl-icd-opencl-dev pocl-opencl-icd gcc libc6-dev"
# hwloc and verbs; the headers of verbs are generated at build time.
packages="$packages pkg-config libhwloc-dev cmake libclang-dev libibverbs-dev libnl-3-dev libnl-route-3-dev"
# etcd, and what its client is built with.
packages="$packages etcd-server protobuf-compiler libprotobuf-dev"
# Mesa's lavapipe, which runs Vulkan on the CPU.
packages="$packages mesa-vulkan-drivers libvulkan1"
# A BLAS for the example of a backend in C.
packages="$packages make libopenblas-dev"
# Tools for the README's requests to a server.
packages="$packages curl"
# A browser, which looks at the pages that commands write.
packages="$packages chromium"
# g++ compiles the CUDA kernels for the CPU; pip fetches NVIDIA's compiler for them.
packages="$packages g++ python3 python3-pip python3-venv"
missing=""
for package in $packages; do
    dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
    if ! command -v apt-get >/dev/null; then
        echo "test-all: this needs the equivalents of the Debian packages:$missing" >&2
        exit 3
    fi
    as_root=""
    [ "$(id -u)" = 0 ] || as_root="sudo"
    $as_root apt-get update -qq
    # shellcheck disable=SC2086 # a list of words
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends $missing
fi

for tool in rustfmt cargo-clippy; do
    command -v "$tool" >/dev/null || { echo "test-all: $tool is missing; run: rustup component add rustfmt clippy" >&2; exit 3; }
done

# NVRTC compiles CUDA kernels without a GPU. A wheel (90 MB), unpacked once.
nvrtc="$PWD/target/nvrtc"
if [ ! -d "$nvrtc/nvidia" ]; then
    mkdir -p "$nvrtc"
    python3 -m pip download --quiet --no-deps --dest "$nvrtc" nvidia-cuda-nvrtc-cu12==12.9.86
    python3 -m zipfile -e "$nvrtc"/*.whl "$nvrtc"
    rm -f "$nvrtc"/*.whl
fi
export MIXFLEET_CUDA_LIBRARIES="$nvrtc/nvidia/cuda_nvrtc/lib"
# And nvdisasm, which shows their machine code (6 MB).
export MIXFLEET_NVDISASM="$nvrtc/nvidia/cu13/bin/nvdisasm"
if [ ! -x "$MIXFLEET_NVDISASM" ]; then
    python3 -m pip download --quiet --no-deps --dest "$nvrtc" nvidia-cuda-nvdisasm==13.5.37
    python3 -m zipfile -e "$nvrtc"/*.whl "$nvrtc"
    rm -f "$nvrtc"/*.whl
    chmod +x "$MIXFLEET_NVDISASM"
fi

began=$SECONDS
# step NAME: prints the next step, and the time of the previous one
step() { printf '\n== %s (at %s s) ==\n' "$1" "$((SECONDS - began))"; }
features=(--workspace --features mixfleet/full)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

# Every test in its own process, as many at a time as there are cores; doc tests are run separately.
run_tests() {
    if cargo nextest --version >/dev/null 2>&1; then
        cargo nextest run --locked --no-fail-fast "${features[@]}" --success-output immediate --failure-output immediate-final
        cargo test --locked --no-fail-fast "${features[@]}" --doc -- --show-output
    else
        echo "cargo-nextest is missing: one test binary runs after the other, which takes longer"
        echo "(to have it: cargo install --locked cargo-nextest)"
        cargo test --locked --no-fail-fast "${features[@]}" -- --show-output
    fi
}

step "format"
cargo fmt --all --check
step "planted bugs still apply"
hwtests/planted.sh --applies
step "lints"
cargo clippy --locked "${features[@]}" --all-targets -- -D warnings
step "default features build without any system library"
cargo clippy --locked -p mixfleet -- -D warnings
step "docs"
RUSTDOCFLAGS="-D warnings -A rustdoc::private_intra_doc_links" cargo doc --locked "${features[@]}" --no-deps --document-private-items
step "supply chain"
hwtests/supply.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "deployment files"
# 3 is a skip with its reason, which the log counts; anything else but 0 fails
hwtests/deploy.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "tests"
run_tests 2>&1 | tee -a "$log"
step "a published model beside llama.cpp"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/real.sh --prompts 4 --tokens 16 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "commands of the README"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/readme.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "pages in a browser"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/pages.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "external engines"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/engines.sh llamacpp 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "endpoint picker behind Envoy"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/epp.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "chat templates beside transformers"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/templates.sh --tenth 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "attacks"
MIXFLEET=${MIXFLEET:-${CARGO_TARGET_DIR:-target}/debug/mixfleet} hwtests/attack.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]
step "RDMA in emulated machines"
hwtests/rdma.sh 2>&1 | tee -a "$log" || [ "${PIPESTATUS[0]}" = 3 ]

step "skipped"
grep -o 'SKIPPED: .*' "$log" | sort | uniq -c || echo "nothing was skipped"
# nextest sums its tests up in a line; what the harness of a single test says is indented
passed=$(awk '/^ *Summary \[/ && match($0, /[0-9]+ passed/) {n += substr($0, RSTART)}
    /^test result:/ {n += $4} END {print n+0}' "$log")
skipped=$(grep -c 'SKIPPED: ' "$log" || true)
echo
echo "tests: $passed passed, 0 failed, $skipped skipped, in $((SECONDS - began)) s"
