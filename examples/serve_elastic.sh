#!/usr/bin/env bash
# Serve a model with an elastic KV cache, ask it something, and show the memory before, during and after.
#
#   PATH="$PWD/.venv/bin:$PATH" examples/serve_elastic.sh "$(xllm fetch smollm2-135m-instruct | tail -n 1)"
#
# Further arguments are flags of `xllm serve`. PORT (8010) says where to listen, MAX_CACHE_SIZE
# (256MiB) how far the cache may grow.
set -euo pipefail

model=${1:?usage: serve_elastic.sh MODEL_FOLDER [flags of xllm serve]}
shift
url=http://127.0.0.1:${PORT:-8010}

xllm serve --model="$model" --model_id=example --host=127.0.0.1 --port="${PORT:-8010}" \
    --enable_vmm_kvcache=true --vmm_elastic=true --max_cache_size="${MAX_CACHE_SIZE:-256MiB}" "$@" &
server=$!
trap 'kill "$server" 2>/dev/null || true; wait "$server" || true' EXIT

# /health answers 503 while the model loads; a server that failed ends the loop
until curl -sf "$url/health" >/dev/null; do
    kill -0 "$server"
    sleep 0.2
done

memory() {
    printf '%s: ' "$1"
    curl -sf "$url/vmm" | grep -oE '"(mapped|physical|kv_live|kv_cached)": ?[0-9]+' | head -n 4 | tr '\n' ' '
    echo
}

sleep 1.5 # spare pages leave within a second
memory before
curl -sf "$url/v1/completions" -H 'Content-Type: application/json' \
    -d '{"model": "example", "prompt": "The capital of France is", "max_tokens": 64, "temperature": 0}' &
request=$!
sleep 0.3
memory during
wait "$request"
echo
sleep 1.5
memory after
