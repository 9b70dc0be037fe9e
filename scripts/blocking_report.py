"""How the passes of the paper's networks are cut for the caches of this machine, and whether memory keeps up.

    python scripts/blocking_report.py [--minibatch 32] [--threads 2] [--networks vgg_a,cd_dnn] [--search]

"bytes/flop" is what the chosen blocking moves between L2 and what lies behind it, "at least" what every array moved
once would be; both count the flop of direct convolution. A pass is bound by memory where it needs more than the balance
of the machine, its measured STREAM triad over its measured peak. With --search, which takes a minute, the answer of the
search over all block sizes of the seven loops (Das et al. 2016) within 128 KB follows for each layer's forward pass.
"""

import argparse

from pcldnn.balance import best_block
from pcldnn.blocking import ConvShape
from pcldnn.layers import Conv2d, Linear
from pcldnn.machine import Machine, threads_per_rank
from pcldnn.models import NETWORKS
from pcldnn.plan import Plan
from pcldnn.text import align


def forward_shape(layer) -> ConvShape | None:
    """The forward pass of a LayerPlan as seven loops; None if it is no product of matrices."""
    if isinstance(layer.layer, Linear):
        return ConvShape(layer.images, layer.layer.in_features, 1, 1, layer.layer.out_features, 1, 1)
    if isinstance(layer.layer, Conv2d):
        conv, image = layer.layer, layer.input.shape
        return ConvShape(layer.images, *image, conv.out_channels, *conv.kernel_size, conv.stride, conv.padding)
    return None


def search_table(plan: Plan) -> str:
    """The block of fewest bytes per flop of each layer's forward pass."""
    rows = [("layer", "images", "ifm", "ofm", "rows", "columns", "stays", "bytes/flop")]
    for layer in plan.layers:
        shape = forward_shape(layer)
        if shape:
            block, resident, ratio = best_block(shape, width=plan.machine.width)
            rows.append((layer.name, *map(str, block[:5]), resident or "nothing", f"{ratio:.4f}"))
    return "\n".join(["search over all blocks of at most 128 KB, forward:", *align(rows, 1)])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatch", type=int, default=32, metavar="N", help="images of a step (default %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="default: those of one rank here")
    parser.add_argument("--networks", default=",".join(NETWORKS), metavar="A,B", help="default: %(default)s")
    parser.add_argument("--search", action="store_true", help="the paper's search over all block sizes as well")
    args = parser.parse_args()
    unknown = [name for name in args.networks.split(",") if name not in NETWORKS]
    if unknown:
        parser.error(f"--networks: got {unknown[0]!r}, wanted some of {', '.join(NETWORKS)}")
    machine, threads = Machine.detect().measured(), args.threads or threads_per_rank(1)[0]
    for name in args.networks.split(","):
        plan = NETWORKS[name]().plan(args.minibatch, threads=threads, machine=machine)
        print(f"{name}\n{plan.blocking_table()}\n")
        if args.search:
            print(f"{search_table(plan)}\n")


if __name__ == "__main__":
    main()
