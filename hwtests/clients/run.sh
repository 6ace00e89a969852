#!/usr/bin/env bash
# Runs public clients against a server that is already up, and fails on any errored request.
#
#   hwtests/clients/run.sh URL MODEL TOKENIZER_DIR [aiperf|guidellm|all]
#   hwtests/clients/run.sh http://127.0.0.1:8000 llama-gqa-f32 ../shared/fixtures/llama-gqa-f32 all
#
# MODEL is a name from /v1/models; TOKENIZER_DIR is the checkpoint that the server runs. The packages
# come from PyPI into a virtual environment under CLIENTS_DIR (default target/clients), about 1.2 GB
# for aiperf and 6 GB for guidellm, which depends on torch. Environment: REQUESTS (default 120),
# CONCURRENCY (8), PROMPT_TOKENS (64), OUTPUT_TOKENS (32), OPENAI_API_KEY, PYTHON (python3, 3.11 or newer).
set -euo pipefail

if [[ $# -lt 3 || $# -gt 4 ]]; then
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
url=${1%/} model=$2 tokenizer=$(cd "$3" && pwd) bench=${4:-aiperf}
here=$(cd "$(dirname "$0")" && pwd)
work=${CLIENTS_DIR:-$here/../../target/clients}
requests=${REQUESTS:-120} concurrency=${CONCURRENCY:-8}
prompt_tokens=${PROMPT_TOKENS:-64} output_tokens=${OUTPUT_TOKENS:-32}
mkdir -p "$work"
work=$(cd "$work" && pwd)

# install NAME PACKAGE...: a virtual environment per client, because their pins disagree.
install() {
    local name=$1
    shift
    [[ -x $work/$name/bin/python ]] || "${PYTHON:-python3}" -m venv "$work/$name"
    "$work/$name/bin/pip" install --quiet --disable-pip-version-check "$@"
}

run_openai() {
    install openai openai==3.52.0
    "$work/openai/bin/python" "$here/openai_stream.py" "$url" "$model"
}

run_guidellm() {
    install guidellm guidellm==0.8.1
    local report=$work/guidellm.json key=${OPENAI_API_KEY:+,api_key=$OPENAI_API_KEY}
    rm -f "$report"
    for format in /v1/chat/completions /v1/completions; do
        HF_HUB_OFFLINE=1 "$work/guidellm/bin/guidellm" run \
            --backend "kind=openai_http,target=$url,model=$model,request_format=$format$key" \
            --profile "kind=concurrent,streams=$concurrency" \
            --constraint "kind=max_requests,count=$requests" \
            --tokenizer "kind=huggingface_auto,model=$tokenizer" \
            --data "kind=synthetic_text,prompt_tokens=$prompt_tokens,output_tokens=$output_tokens" \
            --output "kind=json,path=$report" --disable-console-interactive
        python3 "$here/check_report.py" guidellm "$report" "$requests"
    done
}

# No HF_HUB_OFFLINE: with it aiperf 0.13 takes a directory for the name of a cached repository. The
# directory has all it needs, so nothing is fetched either way.
run_aiperf() {
    install aiperf aiperf==0.13.0
    local out=$work/aiperf
    for endpoint in chat completions; do
        rm -rf "$out-out"
        "$work/aiperf/bin/aiperf" profile --model "$model" --url "$url" --endpoint-type "$endpoint" --streaming \
            --concurrency "$concurrency" --request-count "$requests" --tokenizer "$tokenizer" \
            --synthetic-input-tokens-mean "$prompt_tokens" --synthetic-input-tokens-stddev 0 \
            --output-tokens-mean "$output_tokens" --extra-inputs ignore_eos:true --random-seed 1 \
            --use-server-token-count --artifact-dir "$out-out" --ui simple \
            ${OPENAI_API_KEY:+--api-key "$OPENAI_API_KEY"}
        python3 "$here/check_report.py" aiperf "$out-out/profile_export_aiperf.json" "$requests"
    done
}

case $bench in
    aiperf | guidellm | all) run_openai ;;
    *)
        echo "unknown benchmark '$bench': aiperf, guidellm or all" >&2
        exit 2
        ;;
esac
case $bench in
    aiperf) run_aiperf ;;
    guidellm) run_guidellm ;;
    all)
        run_aiperf
        run_guidellm
        ;;
esac
