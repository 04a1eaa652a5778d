#!/usr/bin/env bash
# All flags from a file, which may be shared by several servers; what is on the command line wins over it.
#
#   PATH="$PWD/.venv/bin:$PATH" examples/serve_config.sh MODEL_FOLDER [flags of xllm serve]
#
# `xllm serve [flags] --print_config` writes such a file.
set -euo pipefail

model=${1:?usage: serve_config.sh MODEL_FOLDER [flags of xllm serve]}
shift

exec xllm serve --config_json_file="$(dirname "$0")/config.json" --model="$model" "$@"
