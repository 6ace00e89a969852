#!/usr/bin/env bash
# Builds the kernels of `cpu` for aarch64 and runs their tests there, conformance included, under QEMU's user mode.
#   hwtests/aarch64.sh [TEST FILTER...]
# Debian: installs qemu-user, a cross compiler and its libc. Exit codes: those of cargo; 3 without rustup or apt-get.
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
exec cargo test --release --no-fail-fast -p mixfleet-cpu --target "$target" -- \
    --skip a_bus_error_of_anything_else "$@"
