#!/usr/bin/env bash
# Resolve the lock files anew. The CPU wheel of torch must be reachable, as for an install.
# The local part of torch's version is cut off, so that any CPU build of that version satisfies the pin.
set -euo pipefail
cd "$(dirname "$0")/.."
resolve() {
    local lock=$1
    shift
    .venv/bin/uv pip compile --quiet --python-version 3.11 --excludes requirements/excluded.txt --no-annotate --no-header \
        --upgrade --no-emit-index-url ${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} --output-file "$lock.new" "$@" >/dev/null
    { echo "# Made by \`make lock\`; do not edit."; sed 's/^torch==\([0-9.]*\)+cpu$/torch==\1/' "$lock.new"; } >"$lock"
    rm "$lock.new"
}
resolve requirements/cpu.lock pyproject.toml --extra cpu --extra deepspeed --extra lora --extra math \
    --extra gymnasium --extra textarena --extra datasets --extra dev
resolve requirements/trl.lock requirements/trl.in
resolve requirements/transfer_queue.lock requirements/transfer_queue.in
resolve requirements/verl.lock requirements/verl.in
