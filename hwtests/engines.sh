#!/usr/bin/env bash
# Serves by engines of others, real ones: two of them behind `mixfleet serve`, one of which is killed in the middle of its
# answers. Every answer must be complete. Exit status: 0 passed, 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/engines.sh llamacpp       llama.cpp, from the package xllamacpp (34 MB), which goes to target/engines
#
# MIXFLEET names the binary (default target/release/mixfleet), GGUF the model (default: the fixture llama-gguf).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: engines: $1" >&2; exit 3; }
case ${1:-} in
llamacpp) ;;
*) sed -n '2,8s/^# \{0,1\}//p' "$0"; [ "${1:-}" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
model=${GGUF:-../shared/fixtures/llama-gguf/model-q8_0.gguf}
"$program" serve --help >/dev/null 2>&1 || skip "no $program; build it with cargo build --release"
[ -f "$model" ] || skip "no model $model; GGUF names one"
python3 -m pip --version >/dev/null 2>&1 || skip "no pip (Debian: python3-pip)"

packages=target/engines/llamacpp
if [ ! -e "$packages/complete" ]; then
    rm -rf "$packages"
    mkdir -p "$packages"
    if ! python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$packages" \
        xllamacpp==2026.10.11549 2>"$packages/log"; then
        cat "$packages/log" >&2
        # pip says so when it reaches no registry, and something else when a package is wrong
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError|No matching distribution' "$packages/log" || exit 1
        skip "xllamacpp cannot be had here"
    fi
    touch "$packages/complete"
fi
PYTHONPATH="$packages" python3 -B -c 'import xllamacpp' 2>/dev/null || skip "xllamacpp does not load here"
PYTHONPATH="$packages" exec python3 -B hwtests/engines/llamacpp.py "$program" "$model"
