#!/bin/sh
# Makes the Python of proto/ anew. What it makes is committed, and never edited by hand.
set -eu
cd "$(dirname "$0")/.."
out=${1:-src}
mkdir -p "$out"
PATH="$PWD/.venv/bin:$PATH" .venv/bin/python -m grpc_tools.protoc -I bursar/wire=proto \
    --python_out="$out" --grpc_python_out="$out" --mypy_out="readable_stubs:$out" --mypy_grpc_out="readable_stubs:$out" \
    bursar/wire/scheduler/v1/node_agent.proto bursar/wire/scheduler/v1/admin.proto
