#!/usr/bin/env bash
# Two models that take turns in one fixed pool: A sleeps, B is forked into A's pages, B sleeps, A wakes.
#
#   PATH="$PWD/.venv/bin:$PATH" examples/share_pool.sh FOLDER_OF_A FOLDER_OF_B [flags of xllm serve]
#
# The pool has room for A's weights and the cache (MAX_CACHE_SIZE, 256MiB); its pages never leave the process. PORT (8010)
# says where to listen.
set -euo pipefail

usage="usage: share_pool.sh FOLDER_OF_A FOLDER_OF_B [flags of xllm serve]"
first=${1:?$usage}
second=${2:?$usage}
shift 2
url=http://127.0.0.1:${PORT:-8010}

xllm serve --model="$first" --model_id=A --host=127.0.0.1 --port="${PORT:-8010}" \
    --enable_vmm_kvcache=true --enable_vmm_weights=true --max_cache_size="${MAX_CACHE_SIZE:-256MiB}" "$@" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT

until curl -sf "$url/health" >/dev/null; do
    kill -0 "$server"
    sleep 0.2
done

post() { # an answer that is no success ends the script
    printf '%s %s\n' "$1" "$2"
    curl -sSf "$url$1" -H 'Content-Type: application/json' -d "$2"
    echo
}

ask() {
    post /v1/completions "{\"model\": \"$1\", \"prompt\": \"The capital of France is\", \"max_tokens\": 8, \"temperature\": 0}"
}

ask A
post /sleep '{"model_id": "A", "master_status": 1}'
post /fork_master "{\"model_id\": \"B\", \"model_path\": \"$second\"}"
ask B
post /sleep '{"model_id": "B", "master_status": 1}'
post /wakeup '{"model_id": "A"}'
ask A
curl -sf "$url/vmm" | grep -oE '"(physical|mapped|weights|parked)": ?[0-9]+' | head -n 4
