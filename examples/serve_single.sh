#!/usr/bin/env bash
# One server in the foreground, as a container or a supervisor runs it: signals reach it, its exit status is the script's.
#
#   PATH="$PWD/.venv/bin:$PATH" examples/serve_single.sh MODEL_FOLDER [flags of xllm serve]
set -euo pipefail

model=${1:?usage: serve_single.sh MODEL_FOLDER [flags of xllm serve]}
shift

exec xllm serve --model="$model" --port="${PORT:-8010}" \
    --enable_vmm_kvcache=true --vmm_elastic=true --vmm_memory_reserve_bytes=1GiB --shutdown_drain_secs=2 "$@"
