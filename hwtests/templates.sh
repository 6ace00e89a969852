#!/usr/bin/env bash
# Compares how chat templates are rendered with transformers, which it installs into target/templates/venv.
#   hwtests/templates.sh [--tenth] [--write TABLE.md]     as hwtests/templates.py, which says more
# Exit codes: 0 equal, 1 not, 3 skipped, with the reason.
# Environment: PYTHON (python3), MIXFLEET (target/release/mixfleet), TEMPLATES_DIR.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=target/templates/venv
[[ -x $venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$venv"
if ! "$venv/bin/pip" --quiet --disable-pip-version-check install jinja2==3.1.6 transformers==5.24.0; then
    echo "SKIPPED: chat templates: transformers cannot be installed"
    exit 3
fi
exec "$venv/bin/python" hwtests/templates.py "$@"
