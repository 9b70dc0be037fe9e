#!/usr/bin/env bash
# Makes .venv in the checkout and installs pcldnn there, built for this machine: bash scripts/setup.sh [EXTRA]
#
# EXTRA is one of pyproject.toml's optional dependencies (default: mpich). Needs Python 3.11 or newer and a C compiler
# with OpenMP; everything else comes with pip. Run again, it does only what has changed. PYTHON=... chooses the Python.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
extra=${1:-mpich}

fail() {
    printf 'pcldnn: %s\n' "$@" >&2
    exit 1
}

# The first Python that is new enough, makes virtual environments and can compile extensions.
find_python() {
    local candidate problem
    problems=""
    for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python}; do
        if ! problem=$("$candidate" - 2>&1 <<'PROBE'
import os, sys, sysconfig
if sys.version_info < (3, 11):
    sys.exit("is Python %d.%d, 3.11 or newer is needed" % sys.version_info[:2])
try:
    import ensurepip, venv
except ImportError:
    sys.exit("cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)")
if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
    sys.exit("has no header files (Debian, Ubuntu: apt-get install python3-dev)")
PROBE
        ); then
            problems+=$'\n'"  $candidate: ${problem##*$'\n'}"
            continue
        fi
        python=$candidate
        return
    done
    fail "no Python that will do was found; PYTHON=/path/to/python names one. Tried:$problems"
}

check_compiler() {
    local compiler
    compiler=${CC:-$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("CC") or "cc")')}
    command -v "${compiler%% *}" >/dev/null ||
        fail "no C compiler: ${compiler%% *} was not found (Debian, Ubuntu: apt-get install gcc libc6-dev; or CC=...)"
}

# What the built package depends on. Python files are used from the checkout and do not count.
fingerprint() {
    {
        echo "${CC:-} ${CFLAGS:-} ${PCLDNN_DEBUG:-} ${PCLDNN_BUILD_ISAS:-}"
        .venv/bin/python -VV
        cat setup.py pyproject.toml pcldnn/_kernels/{isa,tile_x86}.py pcldnn/_kernels/*.{pyx,pxi,h}
    } | cksum
}

install() {
    .venv/bin/python -m pip install --disable-pip-version-check --no-input "$@" >.venv/setup.log 2>&1 && return
    tail -n 40 .venv/setup.log >&2
    fail "the installation failed; the whole log is in $PWD/.venv/setup.log"
}

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    find_python
    check_compiler
    "$python" -m venv --clear .venv || fail "$python could not make a virtual environment in $PWD/.venv"
fi
python=.venv/bin/python
if [ "$(cat .venv/built 2>/dev/null)" != "$(fingerprint)" ] ||
    ! env -u PCLDNN_ISA "$python" -c 'from pcldnn import _kernels' 2>/dev/null; then
    check_compiler
    echo "pcldnn: building and installing into .venv (some minutes; log: .venv/setup.log)" >&2
    rm -f .venv/built .venv/extra-*
    # As a path: before the import hook that is the default comes a folder pcldnn beside the user's program, this checkout.
    install -e ".[$extra]" --config-settings editable_mode=compat
    fingerprint >.venv/built
elif [ ! -e ".venv/extra-$extra" ]; then
    echo "pcldnn: installing what belongs to '$extra' into .venv (log: .venv/setup.log)" >&2
    install "pcldnn[$extra]"
fi
touch ".venv/extra-$extra"
