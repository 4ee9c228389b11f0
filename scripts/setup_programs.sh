#!/usr/bin/env bash
# Install the programs that tests start: PostgreSQL, Prometheus, Alertmanager, Chromium. As root on a Debian-like system it installs the
# missing ones; otherwise it prints the command, and tests that need a missing program skip with a reason.
set -euo pipefail

missing=()
{ command -v initdb || ls /usr/lib/postgresql/*/bin/initdb; } >/dev/null 2>&1 || missing+=(postgresql)
{ command -v prometheus && command -v promtool; } >/dev/null 2>&1 || missing+=(prometheus)
{ command -v prometheus-alertmanager || command -v alertmanager; } >/dev/null 2>&1 || missing+=(prometheus-alertmanager)
{ command -v chromium-headless-shell || command -v chromium || command -v chromium-browser || command -v google-chrome; } >/dev/null 2>&1 || missing+=(chromium)
[ ${#missing[@]} -eq 0 ] && exit 0

if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "setup: installing ${missing[*]}" >&2
    export DEBIAN_FRONTEND=noninteractive
    apt-get update -qq
    # Chromium without its windows, where the system has it: the tests of pages take half of the CPU time.
    if apt-cache show chromium-headless-shell >/dev/null 2>&1; then missing=("${missing[@]/%chromium/chromium-headless-shell}"); fi
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
else
    echo "setup: tests that need ${missing[*]} will skip; install with: sudo apt-get install ${missing[*]}" >&2
fi
