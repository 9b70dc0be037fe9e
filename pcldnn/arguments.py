"""The flags of the training scripts, and where a setting comes from when its flag is not given."""
import argparse
import contextlib
import dataclasses
import os
import textwrap
from collections.abc import Callable

from pcldnn.checkpoint import CollectiveReader
from pcldnn.partition import Partition


@dataclasses.dataclass(frozen=True)
class Job:
    """A network and how to train it: what a script is about.

    Attributes
    ----------
    title : str
    about : str
        First paragraphs of ``--help``.
    build : callable
        ``build(num_classes, sample_shape, dropout, seed)`` -> Network; `dropout` is None for a job without it.
    synthetic_shape : callable
        Image size -> sample shape of made-up data.
    image_size, classes : int
        Of made-up data, by default. `image_size` None: samples are no images, and the flags of images are left out.
    defaults : dict
        Settings for data of the user's own and for made-up data; with "dropout" if the network has any.
    digits : dict or None
        Settings that differ for the embedded digits; None: this network cannot train on them.
    """
    title: str
    about: str
    build: Callable
    synthetic_shape: Callable
    image_size: int | None
    classes: int
    defaults: dict
    digits: dict | None = None


# What a checkpoint keeps and a resumed run takes over; the flag of `lr_every` is --lr-every, and so on.
SETTINGS = ("data", "synthetic", "samples", "image_size", "classes", "scale", "mirror", "shift", "minibatch", "epochs",
            "lr", "lr_schedule", "lr_every", "lr_factor", "lr_power", "lr_warmup", "momentum", "weight_decay", "dropout",
            "seed", "exact", "tune", "validation", "digest_interval")
_EVERYWHERE = {"synthetic": False, "exact": False, "tune": False, "validation": True, "seed": 0,
               "lr_schedule": "constant", "lr_every": 30.0, "lr_factor": 0.1, "lr_power": 1.0, "lr_warmup": 0.0}
_OF_SCHEDULE = {"lr_every": "step", "lr_factor": "step", "lr_power": "poly"}

_EXAMPLES = """\
examples:
  {start}
  mpirun -n 2 python {prog} --data ~/images --checkpoint run.safetensors --metrics run.jsonl
  mpirun -n 4 python {prog} --resume run.safetensors --checkpoint run.safetensors
  mpirun -n 2 python {prog} --synthetic --minibatch 32 --steps 20

files:
  --data DIR holds DIR/train/CLASS/*.jpg (png, ...) and, to validate on, DIR/val/CLASS/*; --data FILE is an .npz with
  images, labels (and val_images, val_labels), or an .npy of images with the labels beside it.
  A checkpoint is a safetensors file: weights under torchvision's names in PyTorch's order, momentum, and where the run
  is. It is written by rank 0 after each epoch, at the end, and when SIGTERM, SIGUSR1 or Ctrl-C stops the run (a
  second Ctrl-C ends it at once); a run resumes on any number of ranks. --resume also takes a plain PyTorch state dict
  saved as safetensors: weights to start from.
  The metrics file has a JSON object a line: step, epoch, loss, images_per_s for each step (global values; steps and
  epochs count from 1) and epoch, top1, top5, count for each evaluation (shares of count, 0 to 1);
  with digests also digest and layers, SHA-256 of weights and momentum, by which python -m pcldnn replay checks a run,
  and run, by which it tells the run from others.

exit code: 0 when training came to its end or was stopped by a signal, 1 after an error (a diverged loss, a damaged
sample, a checkpoint or metrics that could not be written, ranks that disagree), 2 for what cannot be done as asked:
wrong flags, values that the network or the plan refuses, files that cannot be opened.
"""


def make_parser(job, prog=None):
    """The argument parser of a job's script; settings default to None (see `fill`)."""
    about = "\n\n".join(textwrap.fill(paragraph, 110) for paragraph in job.about.split("\n\n"))
    parser = argparse.ArgumentParser(prog=prog, description=about, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    start = f"mpirun -n 2 python {parser.prog}" + ("" if job.digits is not None else " --data speech.npz")
    parser.epilog = _EXAMPLES.format(prog=parser.prog, start=start)

    def default(name):
        values = [job.defaults.get(name, _EVERYWHERE.get(name))]
        if job.digits is not None and job.digits.get(name, values[0]) != values[0]:
            values.append(f"{job.digits[name]} for the embedded digits")
        return f"(default {', '.join(map(str, values))})"

    parser.set_defaults(image_size=None, scale=None, mirror=None, shift=None, dropout=None)
    _add_data(parser.add_argument_group("data"), job)
    training = parser.add_argument_group("training")
    _add_training(training, default)
    if "dropout" in job.defaults:
        training.add_argument("--dropout", type=_real(0.0), metavar="P", help=(
            f"share of hidden fully connected units left out in training {default('dropout')}"))
    _add_running(parser.add_argument_group("running and files"))
    return parser


def _add_data(group, job):
    embedded = "5,000 digits that come with pcldnn"
    if job.digits is None:
        embedded = "none: --data or --synthetic is needed"
    group.add_argument("--data", metavar="DIR|FILE",
                       help=f"images or arrays to train on, see below (default: {embedded})")
    group.add_argument("--synthetic", action="store_true", default=None,
                       help="made-up data of any size: to try and to time things, no files needed")
    group.add_argument("--samples", type=_integer(1), metavar="N",
                       help="how many are made up (default: those of --steps steps, of 64 at most)")
    group.add_argument("--classes", type=_integer(1), metavar="N",
                       help=f"number of classes (default: that of the data; {job.classes} with --synthetic)")
    if job.image_size is not None:
        _add_images(group, job)
    group.add_argument("--skip-damaged", action="store_true", help=(
        "replace a sample that cannot be read by another of its class, instead of stopping with its path"))
    group.add_argument("--data-threads", type=_integer(0), default=2, metavar="N",
                       help="threads of each rank that read and decode ahead (default %(default)s)")
    group.add_argument("--validation", action=argparse.BooleanOptionalAction,
                       help="evaluate after each epoch (the default), or do not")


def _add_images(group, job):
    group.add_argument("--image-size", type=_integer(1), metavar="N", help=(
        "side of the network's square input [pixel]; images are resized and cropped to it (default: 224 for a folder, "
        f"the images' own size for arrays and digits, {job.image_size} with --synthetic)"))
    group.add_argument("--scale", type=_integer(1), nargs=2, metavar=("LOW", "HIGH"), help=(
        "scale jitter: the shorter side is resized to a random length in this range before the random crop [pixel] "
        "(default for a folder: 8/7 to 12/7 of the image size, 256 384 for 224)"))
    group.add_argument("--mirror", action=argparse.BooleanOptionalAction, help=(
        "flip every other image, at random, left to right (default: folders yes, digits and arrays no)"))
    group.add_argument("--shift", type=_integer(0), metavar="N",
                       help="random shift of images that are not resized [pixel] (default: digits 2, else 0)")


def _add_training(group, default):
    group.add_argument("--minibatch", type=_integer(1), metavar="N",
                       help=f"images per step over all ranks; need not divide by the ranks {default('minibatch')}")
    group.add_argument("--epochs", type=_integer(1), metavar="N",
                       help=f"passes over the training data {default('epochs')}")
    group.add_argument("--steps", type=_integer(1), metavar="N", help=(
        "stop after N steps in total, those before a resume included, should the epochs not end before; "
        "does not change the schedule (default: no limit)"))
    group.add_argument("--lr", type=_real(0.0), metavar="X", help=f"learning rate at the start {default('lr')}")
    group.add_argument("--lr-schedule", choices=("constant", "step", "poly"), help=(
        "how it goes on: step multiplies it by --lr-factor after every --lr-every epochs, poly takes it to 0 over "
        f"--epochs as (1 - epoch/epochs)^power {default('lr_schedule')}"))
    group.add_argument("--lr-every", type=_real(0.0), metavar="EPOCHS", help=f"for step {default('lr_every')}")
    group.add_argument("--lr-factor", type=_real(0.0), metavar="X", help=f"for step {default('lr_factor')}")
    group.add_argument("--lr-power", type=_real(0.0), metavar="X", help=f"for poly {default('lr_power')}")
    group.add_argument("--lr-warmup", type=_real(0.0), metavar="EPOCHS", help=(
        f"rise linearly from a tenth of the learning rate within so many epochs {default('lr_warmup')}"))
    group.add_argument("--momentum", type=_real(0.0), metavar="X", help=f"of SGD, 0 to below 1 {default('momentum')}")
    group.add_argument("--weight-decay", type=_real(0.0), metavar="X",
                       help=f"of weights and biases alike {default('weight_decay')}")
    group.add_argument("--seed", type=_integer(0), metavar="N", help=(
        "of weights, order, augmentation and dropout: the same seed gives the same minibatches on any number of ranks "
        f"{default('seed')}"))


def _add_running(group):
    group.add_argument("--threads", type=_integer(1), metavar="N", help=(
        "compute threads of each rank (default: the cores the rank may use, shared with the other ranks on its node)"))
    group.add_argument("--comm-cores", type=_integer(0), metavar="N", help=(
        "cores of each rank kept for its communication thread, which spins there; with 0 it runs beside compute and "
        "sleeps while it waits (default: 1 from 8 cores a rank on)"))
    group.add_argument("--no-overlap", action="store_true",
                       help="exchange between compute, not beside it (the same result, to see what overlap is worth)")
    group.add_argument("--partition", type=partitions, metavar="LAYER=DxM,...", help=(
        "spread layers over D groups of M ranks, D times M being all ranks: each group takes a part of the minibatch, "
        "each rank of it a part of the layer's weights, in whole blocks of output channels. LAYER is a layer's name, "
        "conv1, conv2, ..., fc6, fc7, ... (fc1, ... in a network without convolutions; python -m pcldnn plan shows "
        "both), or conv or fc for all of them "
        "(default: what sends the fewest bytes)"))
    group.add_argument("--exact", action="store_true", default=None, help=(
        "weights that are the same to the last bit on any number of ranks and threads and for any partition; slower"))
    group.add_argument("--tune", action=argparse.BooleanOptionalAction, help=(
        "time direct and Winograd convolution once and take the quicker, by layer and pass, the same on all ranks; the "
        "checkpoint keeps the choice for whoever resumes it (default: a model chooses)"))
    group.add_argument("--digest-interval", type=_integer(1), metavar="N", help=(
        "steps between SHA-256 digests of weights and momentum in the metrics file; a digest takes time (default: "
        "10 with --exact, else none)"))
    group.add_argument("--single-process", action="store_true",
                       help="train in this process alone, without MPI, whatever the launcher says")
    group.add_argument("--checkpoint", metavar="FILE", help="write checkpoints here")
    group.add_argument("--resume", metavar="FILE", help=(
        "go on from this checkpoint; settings that are not given on the command line are taken from it. It may be the "
        "same file as --checkpoint"))
    group.add_argument("--metrics", metavar="FILE", help="write a JSONL file of losses and accuracies")
    group.add_argument("--trace", metavar="FILE", help=(
        "write a timeline of all ranks for ui.perfetto.dev, and print how much communication was hidden behind "
        "compute"))
    group.add_argument("--profile", action="store_true",
                       help="print time, flop/s, share of peak and bytes/s by layer and pass at the end")
    group.add_argument("--log-interval", type=_integer(1), default=10, metavar="N",
                       help="steps between printed lines (default %(default)s)")


def partitions(text):
    """``fc6=2x4,fc7=1x8`` as a dict of Partition."""
    found = {}
    for entry in text.split(","):
        layer, equals, grid = entry.partition("=")
        if not (layer and equals):
            raise argparse.ArgumentTypeError(f"{entry!r}, wanted LAYER=DxM, such as fc6=2x4")
        try:
            found[layer] = Partition.parse(grid)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
    return found


def _integer(least):
    def integer(text):
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}, wanted an integer of at least {least}")
        return value
    return integer


def _real(least):
    def number(text):
        value = float(text)
        if not least <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text}, wanted a number of at least {least:g}")
        return value
    return number


def parse(job, argv, communicator, prog=None):
    """Parse flags on every rank, speak on one, and fill in what was not given; collective.

    Raises
    ------
    SystemExit
        On every rank alike: code 0 after ``--help``, 2 for a wrong flag.
    CollectiveCheckpointError
        When the checkpoint to resume from cannot be read.
    """
    parser = make_parser(job, prog)
    with contextlib.ExitStack() as stack:
        if communicator.rank != 0:
            silence = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        args = parser.parse_args(argv)
        stored = {}
        if args.resume is not None:
            with CollectiveReader(args.resume, communicator) as reader:
                stored = {name: reader.metadata[name] for name in SETTINGS if name in reader.metadata}
                stored.update(reader.metadata.get("settings", {}))
        if stored.get("job", job.title) != job.title:
            parser.error(f"--resume: {args.resume} is a checkpoint of {stored['job']}, wanted one of {job.title}: use the "
                         "script that made it")
        samples, digest_interval = args.samples, args.digest_interval
        resized = [f"--{name}" for name in ("scale", "mirror", "shift") if getattr(args, name) is not None]
        of_schedule = [name for name in _OF_SCHEDULE if getattr(args, name) is not None]
        fill(job, args, stored)
        for name in of_schedule:
            if args.lr_schedule != _OF_SCHEDULE[name]:
                parser.error(f"--{name.replace('_', '-')}: only --lr-schedule {_OF_SCHEDULE[name]} takes it, not "
                             f"{args.lr_schedule}")
        if digest_interval is not None and args.metrics is None:
            parser.error("--digest-interval: digests go to the file of --metrics, which is not given")
        if samples is not None and not args.synthetic:
            parser.error(f"--samples {samples}: that many are made up with --synthetic; other data have their own number")
        if resized and args.synthetic:
            parser.error(f"{', '.join(resized)}: made-up data (--synthetic) are made at the network's size")
        if not args.synthetic and args.data is None and job.digits is None:
            parser.error("--data or --synthetic is needed")
        if args.synthetic and args.data is not None:
            parser.error("--data and --synthetic exclude each other")
        if args.exact and args.tune:
            parser.error("--exact and --tune exclude each other: bits may not depend on a clock (--no-tune)")
    return args


def fill(job, args, stored):
    """Settle each setting: the command line's, else the checkpoint's, else the job's for this kind of data."""
    if args.data is not None or args.synthetic:     # where data come from is one setting
        stored = {name: value for name, value in stored.items() if name not in ("data", "synthetic")}
    for name in ("data", "synthetic"):
        if getattr(args, name) is None:
            setattr(args, name, stored.get(name, _EVERYWHERE.get(name)))
    defaults = {**_EVERYWHERE, **job.defaults}
    if args.data is None and not args.synthetic and job.digits is not None:
        defaults.update(job.digits)
    for name in SETTINGS:
        if getattr(args, name) is None:
            setattr(args, name, stored.get(name, defaults.get(name)))
    if not args.synthetic:
        args.samples = None
    elif args.samples is None:
        args.samples = args.minibatch * min(max(args.steps or 0, 1), 64)


def settings_of(job, args):
    """What a checkpoint keeps: the settled settings, and whose they are."""
    settings = {"job": job.title, **{name: getattr(args, name) for name in SETTINGS}}
    if args.data is not None:
        settings["data"] = os.path.abspath(args.data)
    return settings
