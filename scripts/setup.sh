#!/usr/bin/env bash
# Makes .venv and installs the project into it. Called by make with PYTHON, EXTRAS and STAMP.
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/setup.log
pip=(.venv/bin/python -m pip --disable-pip-version-check)

say() { printf 'setup: %s\n' "$*"; }

# Runs a command into the log, and shows every ten seconds that it still works.
logged() {
  local started=$SECONDS pid status=0
  "$@" >>"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 1
    if (((SECONDS - started) % 10 == 9)); then
      say "$((SECONDS - started)) s: $(tail -n 1 "$log" | cut -c1-90)"
    fi
  done
  wait "$pid" || status=$?
  return "$status"
}

install_failed() {
  tail -n 15 "$log" >&2
  say "failed; all of pip's output is in $log" >&2
  if grep -q 'No matching distribution found for torch' "$log"; then
    say "pip cannot find the CPU build of torch: set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels" >&2
  fi
  exit 1
}

install_tcmalloc() {
  if ldconfig -p 2>/dev/null | grep -q libtcmalloc_minimal || compgen -G '/usr/lib*/*/libtcmalloc_minimal.so*' >/dev/null; then
    return
  fi
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing libtcmalloc-minimal4"
    { apt-get install -y -q libtcmalloc-minimal4 || { apt-get update -q && apt-get install -y -q libtcmalloc-minimal4; }; } \
      >>"$log" 2>&1 && return
  fi
  say "without libtcmalloc-minimal4 prefill on CPU is slower; everything works"
}

mkdir -p build
: >"$log"
if [ ! -x .venv/bin/python ]; then
  command -v "$PYTHON" >/dev/null || { say "$PYTHON not found: give make another PYTHON=" >&2; exit 1; }
  say "making .venv with $PYTHON"
  "$PYTHON" -m venv .venv
fi
say "installing bidikv[$EXTRAS]"
logged "${pip[@]}" install --progress-bar off -e ".[$EXTRAS]" || install_failed
if [[ ,$EXTRAS, == *,cpu,* ]]; then
  # vLLM's CPU build asks for these, needs none of them, and cannot be imported when they do not fit torch.
  "${pip[@]}" uninstall -y torchvision torchaudio torchcodec >>"$log" 2>&1
  install_tcmalloc
fi
rm -f .venv/.installed-*
touch "$STAMP"
say "done in $SECONDS s"
