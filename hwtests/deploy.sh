#!/usr/bin/env bash
# Holds the files of docs/deploy, and those of plans, against the schemas of Kubernetes and Compose, strictly: an unknown field
# is an error; grids of Dynamo's global router against its own loader. All come in packages of PyPI. Plants mistakes first, each of which must be found. Exit status: 0 passed, 1 a file is
# wrong or a planted mistake was not found, 3 could not run (says SKIPPED and why).
set -euo pipefail
cd "$(dirname "$0")/.."

packages=${MIXFLEET_DEPLOY_CACHE:-target/deploy-schemas}
if [ ! -e "$packages/complete" ]; then
    rm -rf "$packages"
    mkdir -p "$packages"
    python3 -m pip --version >/dev/null 2>&1 || { echo "SKIPPED: deployment files: no pip (Debian: python3-pip)" >&2; exit 3; }
    get() { python3 -m pip install --quiet --disable-pip-version-check --root-user-action=ignore --target "$packages" "$@"; }
    if ! { get kubernetes-validate==1.37.0 jsonschema==4.26.0 pyyaml==6.0.3 && get --no-deps check-jsonschema==0.39.0 ai-dynamo==1.6.1; } 2>"$packages/log"; then
        cat "$packages/log" >&2
        # pip says so when it reaches no registry, and something else when a package is wrong
        grep -qE 'Connection|Timeout|Temporary failure|Network is unreachable|ProxyError' "$packages/log" || exit 1
        echo "SKIPPED: deployment files: the package registry is not reached" >&2
        exit 3
    fi
    touch "$packages/complete"
fi
PYTHONPATH="$packages" exec python3 -B hwtests/deploy/check.py "$packages"
