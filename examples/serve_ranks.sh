#!/usr/bin/env bash
# The loop of xLLM's deployment pages: one process a rank, each with its log, left running when the script ends.
#
#   PATH="$PWD/.venv/bin:$PATH" examples/serve_ranks.sh MODEL_FOLDER [flags of xllm serve]
#
# NNODES (1) is the number of ranks, START_PORT (18000) the port of the first, LOG_DIR (log) holds node_RANK.log and
# node_RANK.pid. Stop them with: kill $(cat log/node_*.pid)
set -euo pipefail

model=${1:?usage: serve_ranks.sh MODEL_FOLDER [flags of xllm serve]}
shift
nnodes=${NNODES:-1}
start_port=${START_PORT:-18000}
log_dir=${LOG_DIR:-log}
mkdir -p "$log_dir"

for ((i = 0; i < nnodes; i++)); do
    nohup xllm serve --model="$model" --port=$((start_port + i)) --nnodes="$nnodes" --node_rank="$i" \
        --master_node_addr=127.0.0.1:9748 --block_size=128 --enable_chunked_prefill=true \
        --pid_file="$log_dir/node_$i.pid" "$@" >>"$log_dir/node_$i.log" 2>&1 &
    server=$!
done

# /health answers 503 while the model loads; a rank that failed ends the loop and the script
until curl -sf "http://127.0.0.1:$start_port/health" >/dev/null; do
    kill -0 "$server" || { tail -n 1 "$log_dir"/node_*.log; exit 1; }
    sleep 0.2
done
echo "ready on port $start_port, pids: $(cat "$log_dir"/node_*.pid | tr '\n' ' ')"
