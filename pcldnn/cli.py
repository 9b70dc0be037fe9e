"""``python -m pcldnn``: what it runs on here, what a network would need, whether a shape computes right, replay."""
import argparse
import os
import platform
import runpy
import sys

from pcldnn import __version__, _kernels, models
from pcldnn._kernels.isa import compiled_for
from pcldnn.arguments import partitions
from pcldnn.check import check
from pcldnn.checkpoint import CheckpointError
from pcldnn.layers import Conv2d
from pcldnn.layers.conv import chosen_algorithm
from pcldnn.machine import Machine, cache_sizes, threads_per_rank
from pcldnn.mpi import mpi_information
from pcldnn.replay import replay

SIZES = {"vgg_a": 224, "overfeat_fast": 231}  # side of the input [pixel], of networks that take images


def main(argv=None):
    """Run a command; returns its exit code: 2 for what cannot be done as asked, 1 for what was found to be wrong."""
    args = _parser().parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser():
    parser = argparse.ArgumentParser(prog="python -m pcldnn", description=(
        "pcldnn: synchronous SGD for deep networks on clusters of CPUs. The scripts in scripts/ start training."))
    parser.add_argument("--version", action="version", version=f"pcldnn {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    info = commands.add_parser("info", help="what pcldnn runs on here: ISA, cores, threads, caches, MPI",
                               description="What pcldnn runs on here; for a bug report, and to see that all is well.")
    info.set_defaults(run=_info)

    plan = commands.add_parser(
        "plan", help="shapes, parameters, flop and memory of a network on a number of ranks",
        description="Print the plan of a network: what each layer computes and needs, and what ranks exchange. "
                    "Nothing is allocated (but by --tune) and no MPI is started, so any number of ranks can be "
                    "asked for.",
        epilog="example: python -m pcldnn plan vgg_a --minibatch 256 --ranks 64")
    plan.add_argument("network", choices=models.NETWORKS)
    plan.add_argument("--minibatch", type=int, default=32, metavar="N",
                      help="images per step over all ranks (default %(default)s)")
    plan.add_argument("--ranks", type=int, default=1, metavar="N", help="MPI ranks (default %(default)s)")
    plan.add_argument("--threads", type=int, metavar="N",
                      help="compute threads of a rank (default: those of one rank here)")
    plan.add_argument("--image-size", type=int, metavar="N",
                      help="side of the input [pixel] (default: the network's own)")
    plan.add_argument("--channels", type=int, metavar="N", help="channels of the input (default 3)")
    plan.add_argument("--classes", type=int, metavar="N", help="number of outputs (default: the network's own)")
    plan.add_argument("--partition", type=partitions, metavar="LAYER=DxM,...",
                      help="grids of layers, as for the training scripts (default: what sends least)")
    plan.add_argument("--exact", action="store_true", help="plan exact mode: the same bits on any number of ranks")
    plan.add_argument("--tune", action="store_true",
                      help="time direct and Winograd convolution here, for the images of a rank, and plan the quicker")
    plan.add_argument("--blocking", action="store_true",
                      help="show also how each pass is cut for the caches, and the bytes per flop that this moves "
                           "beside the machine's balance, which is measured")
    plan.add_argument("--inference", action="store_true", help="forward passes only")
    plan.set_defaults(run=_plan)
    _add_check(commands)

    replay = commands.add_parser(
        "replay", help="compute steps of a recorded run again and find the first that differs",
        description="Compute steps of a run again, on one rank, from one of its checkpoints, and compare with the "
                    "digests in its metrics file: the run must have been made with --exact (or --digest-interval). "
                    "Exit code 1 if something differs, and the first step and layer are named; 2 if the metrics file "
                    "has no digest to compare with, or is of another run.",
        epilog="example: python -m pcldnn replay scripts/train_vgg.py step100.safetensors run.jsonl --steps 20")
    replay.add_argument("script", help="the training script that made the run")
    replay.add_argument("checkpoint", help="where to start")
    replay.add_argument("metrics", help="the run's metrics file")
    replay.add_argument("--steps", type=int, metavar="N", help="at most so many (default: as far as there are digests)")
    replay.add_argument("--threads", type=int, metavar="N", help="compute threads")
    replay.set_defaults(run=_replay)
    return parser


def _add_check(commands):
    command = commands.add_parser(
        "check", help="one convolution shape against float64: errors, blocking, speed; for a bug report",
        description="Compute the forward pass, the weight gradient and the input gradient of one convolution by each "
                    "algorithm that can, compare them with float64, and print speeds beside the peak of multiply-adds "
                    "and the roofline. The exit code is 1 if an error is too large.",
        epilog="example: python -m pcldnn check 8 64 112 112 128 3 3 --padding 1")
    for name, meaning in zip("NCHWKRS", ("images", "input channels", "input rows", "input columns", "output channels",
                                         "filter rows", "filter columns")):
        command.add_argument(name, type=int, help=meaning)
    command.add_argument("--stride", type=_pair, default=(1, 1), metavar="N|RxC", help="default 1")
    command.add_argument("--padding", type=_pair, default=(0, 0), metavar="N|RxC", help="default 0")
    command.add_argument("--threads", type=int, metavar="N", help="compute threads (default: those of one rank here)")
    command.set_defaults(run=_check)


def _pair(text):
    """(1, 1) from "1", (1, 2) from "1x2"."""
    sizes = text.split("x")
    if len(sizes) > 2 or not all(size.isdigit() for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}, wanted one number or two, as 1x2 (rows x columns)")
    return int(sizes[0]), int(sizes[-1])


def _check(args):
    for name in "NHWRS":
        if getattr(args, name) < 1:
            raise ValueError(f"{name}: got {getattr(args, name)}, wanted at least 1")
    layer = Conv2d(args.C, args.K, (args.R, args.S), args.stride, args.padding, bias=False)
    threads, _ = threads_per_rank(1, args.threads)
    report = check(args.N, layer, (args.H, args.W), threads)
    caches = ", ".join(f"{level.upper()} {size // 1024:,} KiB" for level, size in cache_sizes().items())
    print(f"pcldnn {__version__}, {_kernels.TARGET} (SIMD width {_kernels.SIMD_WIDTH}), "
          f"{threads} thread{'s' * (threads > 1)}, {_cpu_name()}, {caches or 'caches unknown'}\n{report}")
    return 1 if report.failures else 0


def _replay(args):
    job = runpy.run_path(args.script).get("JOB")
    if job is None:
        raise ValueError(f"script: {args.script!r} defines no JOB, as the training scripts of pcldnn do")
    found = replay(job, args.checkpoint, args.metrics, args.steps, args.threads)
    print(found)
    return 0 if found.step is None else 1


def _info(args):
    machine, caches = Machine.detect(), cache_sizes()
    threads, reason = threads_per_rank(1)
    lacking = [f"{row.name}: {_kernels._missing[row.name]}" for row in compiled_for(platform.machine())
               if row.name in _kernels._missing]
    mpi = mpi_information()
    rows = [
        ("pcldnn", __version__),
        ("Python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        ("CPU", _cpu_name()),
        ("ISA", f"{_kernels.TARGET}" + (" (by PCLDNN_ISA)" if os.environ.get("PCLDNN_ISA") else "")),
        ("SIMD width", f"{_kernels.SIMD_WIDTH} floats"),
        ("targets", f"{', '.join(_kernels.targets)}" + (f" ({'; '.join(lacking)})" if lacking else "")),
        ("convolution", chosen_algorithm(None) + (" (by PCLDNN_CONV)" if os.environ.get("PCLDNN_CONV") else "")),
        ("cores", f"{machine.cores}"),
        ("threads", f"{threads} for a single rank ({reason})"),
        ("caches", ", ".join(f"{level.upper()} {size // 1024:,} KiB" for level, size in caches.items()) or "unknown"),
        ("MPI", mpi["library"]),
        ("mpi4py", mpi["mpi4py"]),
        ("MPI threads", mpi["thread_level"]),
    ]
    for name, value in rows:
        print(f"{name:<12} {value}")
    if mpi["advice"]:
        print(f"note: {mpi['advice']}")
    return 0


def _cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _plan(args):
    build, options, images = models.NETWORKS[args.network], {}, args.network in SIZES
    if images:
        side = args.image_size or SIZES[args.network]
        options["input_shape"] = (args.channels or 3, side, side)
    elif args.image_size or args.channels:
        raise ValueError(f"--image-size, --channels: the input of {args.network} is a vector, not an image")
    if args.classes:
        options["num_classes" if images else "classes"] = args.classes
    threads = args.threads or threads_per_rank(1)[0]
    machine = Machine.detect().measured() if args.blocking else None
    plan = build(**options).plan(args.minibatch, args.ranks, threads=threads, training=not args.inference,
                                 partitions=args.partition, exact=args.exact, tune=args.tune,
                                 machine=machine)
    print(plan)
    if args.blocking:
        print(f"\n{plan.blocking_table()}")
    return 0
