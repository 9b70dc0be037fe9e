"""What the training scripts share: from flags to a finished run. The flags themselves are in arguments.py."""
import contextlib
import os
import signal
import sys
import warnings

from pcldnn import __version__, _kernels, optim
from pcldnn.arguments import parse, settings_of
from pcldnn.checkpoint import CollectiveCheckpointError
from pcldnn.communicator import LaunchError, create
from pcldnn.data import DataError, open_dataset, open_synthetic
from pcldnn.faults import CollectiveError, in_a_line
from pcldnn.launcher import copies_warning
from pcldnn.machine import memory_limit, reserved_cores, threads_per_rank
from pcldnn.text import counted, format_bytes
from pcldnn.train import OutputError, Trainer


class UsageError(CollectiveError):
    """What the user asked for cannot be done; known to all ranks, told in one line."""


def main(job, argv=None):
    """Run a training script: parse, open data, build the network, train.

    Parameters
    ----------
    job : Job
    argv : list of str, optional
        Default: the process's.

    Returns
    -------
    int
        Exit code, the same on every rank.
    """
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr, flush=True)
        return _run(job, sys.argv[1:] if argv is None else argv)


def _run(job, argv):
    alone = "--single-process" in argv
    warning = copies_warning() if alone else None
    if warning:
        print(f"warning: {warning}", file=sys.stderr, flush=True)
    try:
        communicator = create(single_process=alone)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    with communicator, communicator.abort_on_error():
        try:
            return _train(job, parse(job, argv, communicator), communicator)
        except CollectiveError as error:
            if communicator.rank == 0:
                print(f"error: {error}", file=sys.stderr)
            return 2 if isinstance(error, UsageError | CollectiveCheckpointError | OutputError) else 1
        except DataError as error:      # of one rank: `abort_on_error` tells it and ends the others
            if communicator.size > 1 or not error.plain:
                raise
            print(f"error: {in_a_line(error)}", file=sys.stderr)
            return 1


def _train(job, args, communicator):
    train, validation = together(communicator, lambda: open_data(job, args))
    network = together(communicator, lambda: job.build(train.num_classes, train.sample_shape, args.dropout, args.seed))
    optimizer = together(communicator, lambda: optim.SGD(schedule(args), args.momentum, args.weight_decay))
    spread = {"partitions": args.partition, "exact": args.exact}
    plan = together(communicator, lambda: network.plan(args.minibatch, communicator.size, **spread))
    together(communicator, lambda: check_memory(plan, communicator.node_size))
    sharing = communicator.ranks_sharing_cores
    threads, reason = together(communicator, lambda: threads_per_rank(sharing, args.threads))
    reserve, why = together(communicator, lambda: reserved_cores(threads, reason, args.comm_cores))
    if reason != "as requested":
        threads = max(threads - reserve, 1)
    exchange = together(communicator, lambda: start_exchange(communicator, args, reserve, why))
    warning = communicator.oversubscription(threads)
    if communicator.rank == 0:
        print(banner(communicator, threads, reason), flush=True)
        if exchange:
            print(exchange, flush=True)
        print(describe(job, args, network, train, validation), flush=True)
        print(describe_spread(plan), flush=True)
        if warning:
            print(f"warning: {warning}", file=sys.stderr, flush=True)
    trainer = Trainer(network, optimizer, communicator, threads, overlap=not args.no_overlap, tune=args.tune, **spread)
    with stop_signals(trainer):
        result = trainer.fit(train, validation, minibatch=args.minibatch, epochs=args.epochs, steps=args.steps,
                             checkpoint=args.checkpoint, resume=args.resume, metrics=args.metrics,
                             trace=args.trace, profile=args.profile,
                             log_interval=args.log_interval,
                             digest_interval=args.digest_interval if args.metrics else None,
                             settings=settings_of(job, args), threads=args.data_threads, skip_damaged=args.skip_damaged)
    return 1 if result.checkpoint_error or result.metrics_error else 0


def start_exchange(communicator, args, reserve, why):
    """Start the communication thread; returns how ranks exchange, in words, None where there is one rank."""
    if communicator.size == 1:
        return None
    beside = "no overlap (--no-overlap)" if args.no_overlap else communicator.start_thread(reserve)
    return f"exchange: {communicator.transport}; {beside}; {counted(reserve, 'core')} reserved ({why})"


def check_memory(plan, ranks):
    """Refuse at the start what the system would kill later: a plan that `ranks` ranks of this node have no room for."""
    own, room = sum(plan.memory.values()), memory_limit()
    if ranks * own > room:
        raise ValueError(f"memory: {counted(ranks, 'rank')} of this node, {format_bytes(own)} each by the plan, got "
                         f"{format_bytes(room)} in all (physical memory, or the control group's); wanted a smaller "
                         "--minibatch, or ranks on more nodes")


def together(communicator, function):
    """Call `function` on every rank; if the user's input stops one of them, all raise the same UsageError."""
    value, problem = None, None
    try:
        value = function()
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = communicator.allgather_object(problem)
    found = {}
    for rank, text in enumerate(problems):
        if text is not None:
            found.setdefault(text, rank)
    if found:
        here = None in problems or len(found) > 1       # not the same everywhere: say where
        raise UsageError("; ".join(f"rank {rank}: {text}" if here else text for text, rank in found.items()))
    return value


def open_data(job, args):
    """The data sets (train, validation) that the flags name."""
    if args.synthetic:
        shape = job.synthetic_shape(args.image_size or job.image_size)
        train, validation = open_synthetic(shape, args.classes or job.classes, args.samples, args.seed)
    else:
        train, validation = open_dataset(args.data, image_size=args.image_size, num_classes=args.classes,
                                         scale=args.scale, mirror=args.mirror, shift=args.shift)
    return train, validation if args.validation else None


def schedule(args):
    """The learning rate that the flags describe."""
    if args.lr_schedule == "step":
        return optim.StepDecay(args.lr, args.lr_every, args.lr_factor, warmup=args.lr_warmup)
    if args.lr_schedule == "poly":
        return optim.PolynomialDecay(args.lr, max(args.epochs, 1), args.lr_power, warmup=args.lr_warmup)
    return optim.Constant(args.lr, warmup=args.lr_warmup)


def banner(communicator, threads, reason):
    """What the run runs on: ranks, nodes, threads of a rank and why, ISA, MPI library."""
    ranks, nodes = communicator.size, communicator.nodes
    mpi = communicator.library if communicator.library != "none" else f"no MPI ({communicator.note})"
    return (f"pcldnn {__version__}: {counted(ranks, 'rank')} on {counted(nodes, 'node')}, {counted(threads, 'thread')} "
            f"each ({reason}), ISA {_kernels.TARGET} with {_kernels.SIMD_WIDTH} floats a vector, {mpi}")


def describe(job, args, network, train, validation):
    """What is trained on what, and how."""
    shape = "x".join(map(str, train.sample_shape))
    images = f"{len(train):,} images {shape}, {counted(train.num_classes, 'class', 'classes')}"
    validated = f"{len(validation):,} to validate on" if validation is not None else "no validation"
    plan = network.plan(args.minibatch)
    return (f"{job.title}: {network.parameter_count:,} parameters, {plan.flop() / 1e9:,.2f} Gflop an image trained\n"
            f"data: {train.name}: {images}; {validated}\n"
            f"minibatch {args.minibatch}, epochs {args.epochs}, {schedule(args)}, momentum {args.momentum}, "
            f"weight decay {args.weight_decay}, dropout {args.dropout}, seed {args.seed}")


def describe_spread(plan):
    """How layers are spread over ranks, and what exact mode does."""
    split = [f"{layer.name} {layer.partition}" for layer in plan.split_layers]
    text = f"data x model: {', '.join(split)}, other layers {plan.ranks}x1" if split else "all layers data parallel"
    return text + (f"; exact: sums are trees over {plan.pieces} pieces of a minibatch" if plan.pieces else "")


@contextlib.contextmanager
def stop_signals(trainer):
    """SIGTERM, SIGUSR1 or a first Ctrl-C on any rank ends training on all, after the step at hand, with a checkpoint.

    A second Ctrl-C ends the process at once, also inside a kernel. Where Ctrl-C is ignored (a job in the background of
    a shell script), it stays so.
    """
    def stop(number, _):
        trainer.request_stop(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            if trainer.communicator.rank == 0:
                with contextlib.suppress(OSError):  # not print: the signal may have come inside of one
                    os.write(2, b"\nCtrl-C: training stops after the step at hand; a second one ends it at once\n")
    numbers = [number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
               if number != signal.SIGINT or signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
