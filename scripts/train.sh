#!/usr/bin/env bash
# Sets everything up, then trains VGG-A on 2 ranks: bash scripts/train.sh [flags of scripts/train_vgg.py]
#
# Without flags: 4,000 handwritten digits, validated on 1,000 others. RANKS=... is the number of MPI ranks.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh mpich
exec .venv/bin/mpirun -n "${RANKS:-2}" .venv/bin/python scripts/train_vgg.py "$@"
