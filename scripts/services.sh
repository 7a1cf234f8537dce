#!/usr/bin/env bash
# Makes sure that programs which tests start are on this machine: scripts/services.sh redis chromium
# Nothing is started here, and what is on PATH already is left as it is. As root on Debian or Ubuntu it installs the rest.
set -euo pipefail
cd "$(dirname "$0")/.."
log=build/services.log

say() { printf 'services: %s\n' "$*"; }

# A service's programs (one of them is enough), then the package that brings one.
service() {
  case "$1" in
    redis) echo "redis-server valkey-server" redis-server ;;
    chromium) echo "chromium chromium-browser google-chrome" chromium ;;
    *)
      say "unknown service $1: redis or chromium" >&2
      exit 2
      ;;
  esac
}

present() {
  local program
  for program in "$@"; do
    if command -v "$program" >/dev/null; then return 0; fi
  done
  return 1
}

# The package's own service need not start (RUNLEVEL says so to init scripts): tests start theirs on a free port.
install() {
  RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "$1" >>"$log" 2>&1
}

[ $# -gt 0 ] || { say "name at least one of: redis chromium" >&2; exit 2; }
mkdir -p build
for wanted in "$@"; do
  known=$(service "$wanted")
  read -r -a words <<<"$known"
  package=${words[-1]}
  programs=("${words[@]:0:${#words[@]}-1}")
  if present "${programs[@]}"; then continue; fi
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    say "the tests need ${programs[*]/%/,} one of them, on PATH: install the package $package (or its like) and run this again" >&2
    exit 1
  fi
  say "installing $package"
  install "$package" || { apt-get update -q >>"$log" 2>&1 && install "$package"; } || true
  if ! present "${programs[@]}"; then
    tail -n 15 "$log" >&2
    say "could not install $package; all output is in $log" >&2
    exit 1
  fi
done
