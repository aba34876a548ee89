#!/usr/bin/env bash
# Create VENV and install the locked lists into it, then the project itself, editable. Called by `make setup`.
#
# usage: install.sh VENV DEVICE             DEVICE is cpu or gpu
#        install.sh VENV DEVICE packages    only that device's list, with bytecode, into an existing environment: for images
#
# uv installs the lists when pip can get it (40 s instead of 160 s on two cores), under pip's own settings for
# indexes, link folders and certificates; without uv, pip installs the same lists. Builds of torch that are on
# PyTorch's own index only come from there, through uv, which knows its address.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 device=$2 part=${3:-all}
lists=(-r "requirements/$device.txt")
[ "$part" = packages ] || lists+=(-r requirements/dev.txt)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
fail() { echo "setup: $*" >&2; exit 1; }

# The locked lists have wheels of vLLM, torch and DeepSpeed for one system.
case "$(uname -s) $(uname -m)" in
    "Linux x86_64") ;;
    Linux*) fail "gxpo is installed from wheels for x86-64; this machine is $(uname -m) (ARM has none yet). Use an x86-64 machine." ;;
    Darwin*) fail "gxpo needs Linux on x86-64, and vLLM has no wheel for macOS. Use a Linux machine, or docker compose there." ;;
    *) fail "gxpo needs Linux on x86-64; this is $(uname -s). Use a Linux machine or, on Windows, WSL 2." ;;
esac

known='import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))'
if [ ! -x "$venv/bin/python" ]; then
    python=""
    for candidate in python3.11 python3 python3.12; do
        if "$candidate" -c "$known" 2>/dev/null; then
            python=$candidate
            break
        fi
    done
    [ -n "$python" ] || fail "Python 3.11 or 3.12 is needed ($(python3 --version 2>/dev/null || echo 'no python3') is here; 3.13" \
        "and newer have no wheels of vLLM yet); install one and run make setup again"
    "$python" -m venv "$venv" || fail "$python cannot make a virtual environment; install its venv module"
fi
"$venv/bin/python" -c "$known" || fail "$venv has $("$venv/bin/python" --version), and Python 3.11 or 3.12 is needed; remove" \
    "this folder and run make setup again"
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

# On a GPU torch and Triton compile kernels at first use: without a compiler the first training step fails.
if [ "$device" = gpu ] && [ "$part" = all ]; then
    missing=""
    command -v g++ >/dev/null || missing="g++"
    "$venv/bin/python" -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
        missing="$missing $("$venv/bin/python" -c 'import sys; print("python%d.%d-dev" % sys.version_info[:2])')"
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || missing="$missing libnuma1"
    [ -z "$missing" ] || fail "torch and Triton compile kernels on this machine and need" $missing "(Debian's names); install" \
        "them and run make setup again"
fi

# Settings of pip from the environment, or else from its files. `pip config get` of Debian 12 reads the user's file alone.
settings=$("${pip[@]}" config list)
setting() { sed -nE "/^(:env:|global)\.$1=/ {s/^[^=]*=.(.*).\$/\1/; s/\\\\n/ /g; p; q}" <<<"$settings"; }

with_uv() {
    "${pip[@]}" install --quiet --no-deps uv==0.13.8 2>/dev/null || return 1
    local options=(--no-deps --quiet --index-strategy unsafe-best-match) value
    for value in $(setting find-links); do options+=(--find-links "$value"); done
    for value in $(setting extra-index-url); do options+=(--extra-index-url "$value"); done
    for value in $(setting trusted-host); do options+=(--allow-insecure-host "$value"); done
    value=$(setting index-url)
    [ -z "$value" ] || options+=(--default-index "$value")
    value=$(setting cert)
    [ -z "$value" ] || export SSL_CERT_FILE=$value
    "$venv/bin/uv" pip install --python "$venv/bin/python" "${options[@]}" "$@" >"$log" 2>&1
}

torch=$(grep -E '^torch==' "requirements/$device.txt")
no_torch() { grep -qF "$torch" "$log" && grep -qiE 'no version of|no matching distribution|not found|no wheels' "$log"; }
explain_torch() {
    fail "neither the configured package index nor PyTorch's own has $torch for this machine, or the latter cannot be" \
        "reached. Behind a mirror, add its copy of PyTorch's index through PIP_EXTRA_INDEX_URL and run make setup again."
}
backend=cpu
[ "$device" = cpu ] || backend=cu130

if [ "$device" = cpu ]; then size="1.0 GB to download, 3.5 GB on disk"; else size="several GB, CUDA included"; fi
echo "setup: installing the $device list into $venv ($size; a minute or a few)"
give_up() { tail -n 15 "$log" >&2; fail "the installation failed; its last lines are above"; }
if ! with_uv "${lists[@]}"; then
    if ! no_torch && ! "${pip[@]}" install --no-deps --no-compile "${lists[@]}" >"$log" 2>&1; then
        no_torch || give_up
    fi
    if no_torch; then
        [ -x "$venv/bin/uv" ] || explain_torch
        echo "setup: the configured package index has no $torch; fetching it from PyTorch's own (--torch-backend=$backend)"
        with_uv --torch-backend="$backend" "$torch" || { tail -n 5 "$log" >&2; explain_torch; }
        with_uv "${lists[@]}" || give_up
    fi
fi
# A folder of wheels may have the build for CPUs, whose version counts as newer than the one without a suffix.
if [ "$device" = gpu ] && grep -q '^torch==.*+cpu' <<<"$("${pip[@]}" freeze)"; then
    echo "setup: a configured place has $torch+cpu; fetching the build with CUDA"
    with_uv --reinstall "${torch/==/===}" || with_uv --reinstall --torch-backend="$backend" "$torch" || give_up
fi
if [ "$part" = packages ]; then
    # Containers write no bytecode: every process would compile torch, vLLM and the rest. Templates do not compile.
    "$venv/bin/python" -m compileall -qq -j 0 "$venv"/lib/python3*/site-packages || true
else
    "${pip[@]}" install --quiet --no-deps --no-build-isolation --editable .
fi
echo "setup: done"
