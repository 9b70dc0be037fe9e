#!/usr/bin/env python
"""Draw the training curve of one or more runs from the files that --metrics wrote.

    python scripts/plot_metrics.py run.jsonl -o run.png
    python scripts/plot_metrics.py one_rank.jsonl two_ranks.jsonl --labels "1 rank" "2 ranks" -o ranks.png

Above the loss of each step, below the validation accuracy. Needs matplotlib: pip install "pcldnn[plot]"
"""

import argparse
import json
import sys
from pathlib import Path

INK, MUTED, GRID = "#222222", "#666666", "#e4e4e4"
COLOURS = ("#0b6e99", "#c2571a", "#4d7c2a", "#7a4b94", "#a3334f")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", type=Path, help="JSONL files")
    parser.add_argument("-o", "--output", type=Path, required=True, help="picture to write: .png, .svg, .pdf")
    parser.add_argument("--labels", nargs="+", help="a name for each file; files of one name share a colour "
                        "(default: the files' names)")
    parser.add_argument("--title", default="", help="stands above the picture")
    args = parser.parse_args()
    if args.labels and len(args.labels) != len(args.metrics):
        parser.error(f"--labels: got {len(args.labels)} names, wanted one for each of {len(args.metrics)} files")
    try:
        runs = [read(path) for path in args.metrics]
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
    try:
        import matplotlib
    except ImportError:
        sys.exit('matplotlib is not installed: pip install "pcldnn[plot]"')
    matplotlib.use("Agg")
    try:
        figure = draw(runs, args.labels or [path.stem for path in args.metrics], args.title)
        figure.savefig(args.output, dpi=150)
    except OSError as error:
        sys.exit(f"{error.filename or args.output}: {error.strerror}")


def read(path):
    """Losses [(step, loss)] and evaluations [(step, top1, count)] of a metrics file.

    An evaluation line has no step of its own: it was made after the step before it.
    """
    losses, evaluations, step = [], [], 0
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            sys.exit(f"{path}: line {number} is not JSON")
        if "step" in record:
            step = record["step"]
            losses.append((step, record["loss"]))
        elif "top1" in record:
            evaluations.append((step, record["top1"], record["count"]))
    if not losses:
        sys.exit(f"{path}: no training steps in it")
    return losses, evaluations


def draw(runs, labels, title):
    """The figure: loss over steps and, if any run was evaluated, accuracy over the same steps."""
    from matplotlib import pyplot

    evaluated = any(evaluations for _, evaluations in runs)
    figure, axes = pyplot.subplots(1 + evaluated, 1, sharex=True, squeeze=False, figsize=(8, 3 + 2.2 * evaluated),
                                   layout="constrained", height_ratios=(3, 2)[: 1 + evaluated])  # fmt: skip
    axes = axes[:, 0]
    for index, ((losses, evaluations), label) in enumerate(zip(runs, labels, strict=True)):
        first = labels.index(label)
        colour = COLOURS[list(dict.fromkeys(labels)).index(label) % len(COLOURS)]
        axes[0].plot(*zip(*losses, strict=True), color=colour, linewidth=1.2, label=label if index == first else None)
        if evaluations:
            accuracy(axes[1], evaluations, colour, name_last=index == 0)
    axes[0].set_ylabel("training loss")
    axes[0].set_ylim(bottom=0)
    if evaluated:
        axes[1].set_ylabel("top-1 on validation [%]")
        axes[1].set_ylim(top=100)
    if len(runs) > 1:
        axes[0].legend(frameon=False, labelcolor=INK)
    axes[-1].set_xlabel("step")
    for panel in axes:
        style(panel)
    figure.align_ylabels()
    if title:
        figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=11)
    return figure


def accuracy(panel, evaluations, colour, name_last):
    """Accuracy after each epoch; the last one in figures."""
    steps, top1, counts = zip(*evaluations, strict=True)
    percent = [100 * share for share in top1]
    panel.plot(steps, percent, "o-", color=colour, linewidth=1.2, markersize=4, clip_on=False)
    if name_last:
        panel.annotate(f"{percent[-1]:.1f} % of {counts[-1]:,}", (steps[-1], percent[-1]), xytext=(0, -14),
                       textcoords="offset points", ha="right", color=INK, fontsize=9)  # fmt: skip


def style(panel):
    panel.grid(color=GRID, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)
    panel.tick_params(colors=MUTED, length=0)
    panel.yaxis.label.set_color(MUTED)
    panel.xaxis.label.set_color(MUTED)
    for side in panel.spines.values():
        side.set_visible(False)


if __name__ == "__main__":
    main()
