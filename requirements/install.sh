#!/usr/bin/env bash
# Create VENV and install the locked lists into it, then the project itself, editable. Called by `make setup`.
#
# usage: install.sh VENV DEVICE        DEVICE is cpu or gpu
#
# uv installs the lists when pip can get it (40 s instead of 160 s on two cores), under pip's own settings for
# indexes, link folders and certificates; without uv, pip installs the same lists.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 device=$2
lists=(-r "requirements/$device.txt" -r requirements/dev.txt)
log=$(mktemp)
trap 'rm -f "$log"' EXIT

if [ ! -x "$venv/bin/python" ]; then
    python=""
    for candidate in python3.11 python3 python3.12; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || { echo "setup: Python 3.11 or 3.12 is needed; install it and run make setup again" >&2; exit 1; }
    "$python" -m venv "$venv" || { echo "setup: $python cannot make a virtual environment; install its venv module" >&2; exit 1; }
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# Settings of pip from the environment, or else from its files.
setting() { "${pip[@]}" config get ":env:.$1" 2>/dev/null || "${pip[@]}" config get "global.$1" 2>/dev/null || true; }

with_uv() {
    "${pip[@]}" install --quiet --no-deps uv==0.13.8 2>/dev/null || return 1
    local options=(--no-deps --quiet --index-strategy unsafe-best-match) value
    for value in $(setting find-links); do options+=(--find-links "$value"); done
    for value in $(setting extra-index-url); do options+=(--extra-index-url "$value"); done
    value=$(setting index-url)
    [ -z "$value" ] || options+=(--default-index "$value")
    value=$(setting cert)
    [ -z "$value" ] || export SSL_CERT_FILE=$value
    "$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" "${lists[@]}" >"$log" 2>&1
}

torch=$(grep -E '^torch==' "requirements/$device.txt")
no_torch() { grep -qF "$torch" "$log" && grep -qiE 'no version of|no matching distribution|not found|no wheels' "$log"; }
explain_torch() {
    echo "setup: pip finds no $torch on this machine. Add PyTorch's CPU wheel index through PIP_EXTRA_INDEX_URL" \
        "(its address is on PyTorch's own install page) and run make setup again." >&2
    exit 1
}

echo "setup: installing the $device list into $venv (about 3 GB; a minute or a few)"
if ! with_uv; then
    if no_torch; then explain_torch; fi
    if ! "${pip[@]}" install --no-deps --no-compile "${lists[@]}" >"$log" 2>&1; then
        if no_torch; then explain_torch; fi
        tail -n 15 "$log" >&2
        echo "setup: the installation failed; its last lines are above" >&2
        exit 1
    fi
fi
"${pip[@]}" install --quiet --no-deps --no-build-isolation --editable .
echo "setup: done"
