#!/usr/bin/env bash
# Builds the kernels of `cpu` for aarch64 and runs their tests there, conformance included, under QEMU's user mode.
# Once for each of three processors, which differ in their instruction levels.
#   hwtests/aarch64.sh [TEST FILTER...]
# Debian: installs qemu-user, a cross compiler and its libc. Exit codes: 1 where a test failed; 3 without rustup or apt-get.
set -euo pipefail
cd "$(dirname "$0")/.."
target=aarch64-unknown-linux-gnu
for tool in rustup apt-get; do
    command -v "$tool" >/dev/null || { echo "aarch64: SKIPPED: $tool is missing" >&2; exit 3; }
done
if ! command -v qemu-aarch64 >/dev/null || ! command -v aarch64-linux-gnu-gcc >/dev/null; then
    as_root=""
    [ "$(id -u)" = 0 ] || as_root="sudo"
    DEBIAN_FRONTEND=noninteractive $as_root apt-get install -y -qq --no-install-recommends \
        qemu-user gcc-aarch64-linux-gnu libc6-dev-arm64-cross
fi
rustup target add "$target"
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc
export CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu"
# a process that this one starts is not emulated, unless the kernel knows how (binfmt_misc)
echo "aarch64: SKIPPED: a_bus_error_of_anything_else_still_ends_the_process, which starts itself anew"
# emulated arithmetic is too slow without optimisation
tests=(cargo test --release -p mixfleet-cpu --target "$target")
"${tests[@]}" --no-run
failed=0
# every level, those of 2018 (dot products of bytes), and those of 2012; machines with equal levels are
# checked in full once
for cpu in max neoverse-n1 cortex-a57; do
    export QEMU_CPU=$cpu
    levels=$("${tests[@]}" --lib -- --nocapture levels_rise_from_portable 2>&1 | grep -o 'instruction levels: .*')
    echo "aarch64: QEMU's $cpu: $levels"
    skipped=(--skip a_bus_error_of_anything_else)
    if [ "$cpu" != max ]; then
        echo "aarch64: $cpu: conformance with quick effort, on one core"
        skipped+=(--skip all_cores_conform)
    fi
    "${tests[@]}" --no-fail-fast -- "${skipped[@]}" "$@" || failed=1
done
exit "$failed"
