#!/usr/bin/env bash
# Lays the packages out under their import names in build/types, where mypy finds them.
set -euo pipefail
cd "$(dirname "$0")/.."
types=build/types
mkdir -p "$types/bidikv"
find "$types" -type l ! -exec test -e {} \; -delete # What was renamed or removed since.
for entry in sdk/*; do
  [ "${entry##*/}" = __pycache__ ] || ln -sfn "../../../$entry" "$types/bidikv/${entry##*/}"
done
ln -sfn ../../../examples/agents "$types/bidikv/examples"
ln -sfn ../../server "$types/bidikv_server"
