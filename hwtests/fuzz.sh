#!/usr/bin/env bash
# Fuzzes every parser of untrusted bytes for longer than the tests of a change do: with libFuzzer and the
# address sanitizer if cargo-fuzz and a nightly compiler are installed, else by seeded mutations alone. The
# first line says which.
# hwtests/fuzz.sh [SECONDS for each target; default 120] [TARGET...]
# New inputs go to target/fuzz/found, failing ones to target/fuzz. Exit codes: 0 no failure found, 1 a failure
# found.
set -uo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-120}
targets=("${@:2}")
[[ ${#targets[@]} -gt 0 ]] || mapfile -t targets < <(ls runtime/fuzz/corpus)
mkdir -p target/fuzz

if ! cargo +nightly fuzz --version >/dev/null 2>&1; then
    echo "seeded mutations, without coverage: cargo-fuzz or a nightly compiler is missing"
    MIXFLEET_FUZZ_CASES=${MIXFLEET_FUZZ_CASES:-20000} MIXFLEET_FUZZ_SEED=$(date +%Y%m%d) \
        cargo test -p mixfleet-fuzz --test fuzz -- --show-output
    exit
fi
echo "libFuzzer with the address sanitizer, $seconds s for each of ${#targets[@]} targets"
fuzz=(cargo +nightly fuzz)
place=(--fuzz-dir runtime/fuzz/libfuzzer --target-dir "$PWD/target/libfuzzer")
"${fuzz[@]}" build "${place[@]}" any || exit 1
status=0
for target in "${targets[@]}"; do
    found=target/fuzz/found/$target
    mkdir -p "$found"
    log=target/fuzz/$target.log
    code=0
    MIXFLEET_FUZZ_TARGET=$target "${fuzz[@]}" run "${place[@]}" any "$PWD/$found" "$PWD/runtime/fuzz/corpus/$target" -- \
        -max_total_time="$seconds" -timeout=30 -rss_limit_mb=2048 -max_len=16384 -print_final_stats=1 \
        -artifact_prefix="$PWD/target/fuzz/$target-" >"$log" 2>&1 || code=$?
    [[ $code = 0 ]] || status=1
    runs=$(sed -n 's/^stat::number_of_executed_units: *//p' "$log")
    peak=$(sed -n 's/^stat::peak_rss_mb: *//p' "$log")
    covered=$(grep -o 'cov: [0-9]*' "$log" | tail -1)
    printf '%-18s exit %s, %s executions, %s, %s MB at most\n' "$target" "$code" "${runs:-?}" "${covered:-?}" "${peak:-?}"
done
exit $status
