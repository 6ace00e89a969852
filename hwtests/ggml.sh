#!/usr/bin/env bash
# Compares how GGUF files are read with the `gguf` package and with llama.cpp: every type of weights bit by
# bit, and every vocabulary of llama.cpp's source package with its own test texts and with generated ones.
#
#   hwtests/ggml.sh [TEXTS for each vocabulary; default 2000]
#
# Needs python3 with venv and cargo. Downloads 140 MB into GGML_DIR (target/ggml) once, and writes 1 GB there.
set -euo pipefail
cd "$(dirname "$0")/.."
texts=${1:-2000}
folder=${GGML_DIR:-$PWD/target/ggml}
release=llama_cpp_python-0.3.36
mkdir -p "$folder"
[[ -x $folder/venv/bin/python ]] || "${PYTHON:-python3}" -m venv "$folder/venv"
pip=("$folder/venv/bin/pip" --quiet --disable-pip-version-check)
"$folder/venv/bin/python" -c 'import gguf, xllamacpp' 2>/dev/null ||
    "${pip[@]}" install numpy gguf==0.19.0 xllamacpp==2026.10.11549
if [[ ! -d $folder/$release ]]; then
    "${pip[@]}" install scikit-build-core==1.1.2
    "${pip[@]}" download --no-binary :all: --no-deps --no-build-isolation --dest "$folder" "llama-cpp-python==${release##*-}"
    tar xzf "$folder/$release.tar.gz" -C "$folder" "$release/vendor/llama.cpp/models"
    rm "$folder/$release.tar.gz"
fi
models=$folder/$release/vendor/llama.cpp/models
"$folder/venv/bin/python" hwtests/ggml_types.py "$folder/types"
"$folder/venv/bin/python" hwtests/vocabularies.py "$models" --texts "$texts" --out "$folder/vocabularies"
MIXFLEET_GGML_TYPES=$folder/types MIXFLEET_VOCABULARIES=$models MIXFLEET_VOCABULARY_CASES=$folder/vocabularies \
    cargo test --locked --workspace --features mixfleet/full -p mixfleet-runtime --lib -- --nocapture gguf::
