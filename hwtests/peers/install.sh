#!/usr/bin/env bash
# Installs what mixfleet is compared with: torch and transformers in a virtual environment, llama.cpp's bench,
# batched bench and quantiser from the sources in llama-cpp-python, and CHECKPOINT_DIR as GGUF. All from PyPI.
#
#   hwtests/peers/install.sh CHECKPOINT_DIR
#
# Needs python3 with venv and a C++ compiler; 7 GB of disk (torch brings its CUDA libraries), the size of
# the checkpoint once more, and minutes. Environment: PEERS_DIR (default target/peers), PYTHON (python3), JOBS.
set -euo pipefail

if [[ $# -ne 1 || ! -f $1/config.json ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" | sed '/^set/d' >&2
    exit 2
fi
here=$(cd "$(dirname "$0")" && pwd)
checkpoint=$(cd "$1" && pwd)
peers=${PEERS_DIR:-$here/../../target/peers}
mkdir -p "$peers"
cd "$peers"
[[ -x venv/bin/python ]] || "${PYTHON:-python3}" -m venv venv
pip=(venv/bin/pip --quiet --disable-pip-version-check)
"${pip[@]}" install torch==2.15.0 transformers==5.23.0 gguf==0.19.0 cmake==4.4.4 scikit-build-core==1.1.2

release=llama_cpp_python-0.3.36
[[ -f $release.tar.gz ]] ||
    "${pip[@]}" download --no-binary :all: --no-deps --no-build-isolation "llama-cpp-python==${release##*-}"
[[ -d $release ]] || tar xzf "$release.tar.gz"
sources=$release/vendor/llama.cpp
# GCC before 13 leaves out most of the bytes that _tile_loadconfig reads, and the program ends with SIGSEGV where there is AMX
tiles=$sources/ggml/src/ggml-cpu/amx/mmq.cpp
grep -q 'r"(&tc)' "$tiles" ||
    sed -i 's/^    _tile_loadconfig(&tc);/    __asm__ volatile("" : : "r"(\&tc) : "memory");\n&/' "$tiles"
venv/bin/cmake -S "$sources" -B "$sources/build" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF >cmake.log
venv/bin/cmake --build "$sources/build" -j "${JOBS:-$(nproc)}" --target llama-bench llama-batched-bench llama-quantize \
    >>cmake.log
for program in llama-bench llama-batched-bench llama-quantize; do ln -sf "$sources/build/bin/$program" "$program"; done

venv/bin/python "$here/to_gguf.py" "$checkpoint" model.gguf
echo "installed: hwtests/peers/cpu.py --model $1"
