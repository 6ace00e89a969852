#!/usr/bin/env bash
# Runs the checks that take too long for every change: a failing part does not stop the others, and a summary
# lists the results.
# hwtests/nightly.sh [DIRECTORY for logs; default target/nightly]
# Exit codes: 0 all passed, 1 one did not.
set -uo pipefail
cd "$(dirname "$0")/.."
logs=${1:-target/nightly}
mkdir -p "$logs"
summary=""
status=0

# part NAME COMMAND...
part() {
    local name=$1 began=$SECONDS code=0
    shift
    "$@" >"$logs/$name.log" 2>&1 || code=$?
    [[ $code = 0 ]] || status=1
    summary+=$(printf '%-8s exit %-3s %6s s  %s/%s.log' "$name" "$code" "$((SECONDS - began))" "$logs" "$name")$'\n'
}

part soak hwtests/soak.sh --minutes 30 --clients 200 --out "$logs/soak.json"
part soak-fleet hwtests/soak.sh --fleet --minutes 30 --clients 60 --out "$logs/soak-fleet.json"
part attack hwtests/attack.sh --full
part trials env MIXFLEET_GRAMMAR_SEEDS=2000 cargo test -p mixfleet --features full --test all -- --nocapture every_trial_of
part chaos env MIXFLEET_CHAOS_SEEDS=0..20000 cargo test -p mixfleet-runtime --test all every_request -- --nocapture
part members env MIXFLEET_CHAOS_SEEDS=0..5000 cargo test -p mixfleet-runtime --test all members_that -- --nocapture
part agree env MIXFLEET_AGREE_SEEDS=3 cargo test -p mixfleet-runtime --test all -- --nocapture agree::
part predictions env MIXFLEET_PREDICTIONS=full cargo test -p mixfleet-runtime --test all predictions:: -- --nocapture
part seeds env MIXFLEET_SIM_SEEDS=3 cargo test -p mixfleet-sim --test all -- --nocapture with_equal_prices prediction_answers
# other cases of properties each night, drawn again by the number in the log's name
night=$(date +%Y%m%d)
part "properties-$night" env PROPTEST_RNG_SEED="$night" cargo test --workspace --features mixfleet/full --no-fail-fast --lib --test all
part kernels env MIXFLEET_OPENCL_LEVEL=full MIXFLEET_NVRTC=full MIXFLEET_WGPU_LEVEL=full cargo test -p mixfleet-opencl \
    -p mixfleet-cuda -p mixfleet-wgpu --features mixfleet-opencl/opencl --test all -- --nocapture conformance:: nvrtc::
part golden env MIXFLEET_GOLDEN=full MIXFLEET_WGPU_LEVEL=full cargo test -p mixfleet --features full --test all -- --nocapture golden::
# a clone without shared data beside it
part alone env MIXFLEET_FIXTURES=nowhere cargo test -p mixfleet --features full --test all -- --nocapture golden:: fleet:: tiers:: compare::
part ggml hwtests/ggml.sh
part real hwtests/real.sh --prompts 30
part page hwtests/page.sh "$logs/page"
part laws cargo run --quiet --release -p mixfleet-hal --example laws -- --check
part truth cargo run --quiet --release -p mixfleet-sim --example truth -- --check
part planted hwtests/planted.sh
part templates bash -c 'hwtests/templates.sh || [ $? = 3 ]'
part styles cargo test -p mixfleet-runtime --lib -- --nocapture published_templates
part lm-eval bash -c 'hwtests/lm_eval.sh || [ $? = 3 ]'
part fuzz hwtests/fuzz.sh
part restarts hwtests/engines.sh soak --minutes 30
# 3 is a skip with its reason, which the log has
part mooncake bash -c 'hwtests/mooncake.sh || [ $? = 3 ]'
part readme hwtests/readme.sh --install
part package hwtests/package.sh all
part aarch64 bash -c 'hwtests/aarch64.sh || [ $? = 3 ]'
part matrices bash -c 'hwtests/matrices.sh || [ $? = 3 ]'
part vllm bash -c 'hwtests/engines.sh vllm || [ $? = 3 ]'
part kvcanary bash -c 'KVCANARY_CLEAN=10000 hwtests/engines.sh kvcanary || [ $? = 3 ]'
printf '%s' "$summary"
exit "$status"
