#!/usr/bin/env bash
# Makes or completes the virtual environment: a CPU build of torch, then tarsus with everything it can use.
# Installs the system libraries that pip cannot bring, or says how. Run by the Makefile; safe to repeat.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3.11}
venv=${VENV:-.venv}
torch=${TORCH:-2.13.0}

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: %s\n' "$*" >&2
    exit 1
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
        fail "'$python' is missing or older than Python 3.11." \
            "Debian, Ubuntu: apt-get install python3.11 python3.11-venv; or name another one: make setup PYTHON=python3.12"
    say "making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv" ||
        fail "'$python' cannot make a virtual environment. Debian, Ubuntu: apt-get install $(basename "$python")-venv"
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Before anything that depends on torch, so that pip does not choose another build. On Linux, PyPI's own build brings
# CUDA; an index with CPU builds saves a few GB: TORCH_INDEX=URL. Another build that is already there stays.
install_torch() {
    if [ "$(installed torch | cut -d+ -f1)" = "${torch%%+*}" ]; then
        return
    fi
    say "installing torch $torch"
    pip install --quiet "torch==$torch" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ||
        fail "torch $torch could not be installed; TORCH_INDEX=URL adds another package index to pip's own sources"
}

installed() {
    "$venv/bin/python" -c 'import importlib.metadata as m, sys; print(m.version(sys.argv[1]))' "$1" 2>/dev/null || true
}

install_tarsus() {
    say "installing tarsus and what it uses"
    pip install --quiet --editable '.[all,dev]'
}

missing_libraries() { "$venv/bin/python" -c 'import tarsus_doctor; print(*tarsus_doctor.system_packages())'; }

apt_install() {
    local output
    say "installing $*"
    output=$({ apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y "$@"; } 2>&1) ||
        say "apt-get failed: $(tail -n 1 <<<"$output")"
}

# Drawing without a display, and Pinocchio's threads.
check_libraries() {
    local missing
    missing=$(missing_libraries)
    if [ -n "$missing" ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        apt_install $missing
        missing=$(missing_libraries)
    fi
    if [ -n "$missing" ]; then
        say "some things will not work (pictures and videos, or Pinocchio; \`$venv/bin/tarsus doctor\` says which) until you type"
        say "    sudo apt-get install $missing"
    fi
}

make_venv
install_torch
install_tarsus
check_libraries
say "done; $venv/bin/tarsus --help"
