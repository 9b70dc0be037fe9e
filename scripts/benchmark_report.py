#!/usr/bin/env python
"""Turn the JSON of a benchmark run into the tables of docs/performance.md and a roofline plot.

    pytest tests/benchmarks --benchmark-only --benchmark-json=results.json
    python scripts/benchmark_report.py results.json

The tables go between two marks of the page; what else stands on it is kept. The plot needs matplotlib.
"""

import argparse
import json
from math import exp, log
from pathlib import Path

BEGIN, END = "<!-- benchmark tables: begin -->", "<!-- benchmark tables: end -->"
PEERS = ("reference", "torch", "onednn")
PASSES = ("forward", "input_grad", "weight_grad")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("results", type=Path, help="JSON file of pytest-benchmark")
    parser.add_argument("--output", type=Path, default=Path("docs/performance.md"), help="page (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="PNG file (default: roofline.png beside the page)")
    parser.add_argument("--no-plot", action="store_true", help="tables only")
    arguments = parser.parse_args()

    run = json.loads(arguments.results.read_text())
    groups, turns = grouped(run)
    plot = arguments.plot or arguments.output.parent / "roofline.png"
    if not groups and not turns:
        raise SystemExit(f"{arguments.results}: holds no results of tests/benchmarks")
    text = "\n\n".join(filter(None, (
        conditions(run), step_table(groups), layer_table(groups), means(groups), choice_table(turns),
        memory_table(groups),
        None if arguments.no_plot else f"![Roofline]({plot.name})",
    )))  # fmt: skip
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    insert(arguments.output, text)
    if not arguments.no_plot:
        draw(groups, plot)


def grouped(run) -> tuple[list[tuple[dict, dict]], list[dict]]:
    """Pairs (one of our rows, the peers' rows of the same layer, pass and minibatch by target); rows of turns."""
    groups, turns = {}, []
    for result in run["benchmarks"]:
        info = result["extra_info"]
        if "direct_ratio" in info:
            turns.append(info)
        elif "gflops" in info:
            groups.setdefault(result["group"], []).append({**info, "seconds": result["stats"]["median"]})
    pairs = []
    for rows in groups.values():
        peers = {row["target"]: row for row in rows if row["target"] in PEERS}
        pairs += [(row, peers) for row in rows if row["target"] not in PEERS]
    return pairs, turns


def conditions(run) -> str:
    """On what, when and with what the numbers were measured."""
    rows = [row["extra_info"] for row in run["benchmarks"]]
    peaks = sorted({row["peak_gflops"] for row in rows if "peak_gflops" in row})
    triads = sorted({row["triad_bytes_per_s"] for row in rows if "triad_bytes_per_s" in row})
    machine, threads = run["machine_info"], rows[0]["threads"]
    versions = {name: machine.get(key) for name, key in
                (("PyTorch", "torch"), ("oneDNN inside it", "onednn"), ("NumPy", "numpy"))}  # fmt: skip
    lines = [
        f"Measured on {machine.get('cpu', {}).get('brand_raw', 'an unknown CPU')}, {threads} threads, "
        f"{run['datetime'][:10]}"
        + "".join(f", {name} {version}" for name, version in versions.items() if version)
        + ".",
        f"Peak of the multiply-add loop, measured again and again in the same run: {span(peaks, '{:.0f}')} GFLOP/s"
        + (f"; STREAM triad {span([rate / 1e9 for rate in triads], '{:.1f}')} GB/s." if triads else "."),
        (
            "All numbers are medians. Flop count all taps of a filter, also those that fall in the padding and are "
            "never computed. NumPy is the twin (im2col and BLAS). PyTorch is the best of contiguous and channels_last, "
            "of MKL and oneDNN; oneDNN is the time that its own primitives report, without the reorders around them. "
            "Tile: what a register tile fed from L1 reached of the peak between the rounds of the row; 100 % on a core "
            "of one's own. Quiet: the median of those rounds before and after which the tile was at 95 %, if there were "
            "three."
        ),
    ]
    return "\n".join(lines)


def span(values, form) -> str:
    """'128' or '120 to 128'."""
    texts = dict.fromkeys(form.format(value) for value in (values[0], values[-1]))
    return " to ".join(texts)


# --- tables -----------------------------------------------------------------------------------------------------


def table(header, rows) -> str:
    """A Markdown table; the columns from the first number on are aligned right."""
    first_number = next(i for i, name in enumerate(header) if "/s" in name)
    rule = ["---" if i < first_number else "---:" for i in range(len(header))]
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [header, rule, *rows])


def number(value, form="{:.0f}") -> str:
    return "" if value is None else form.format(value)


def ratio(row, peer) -> float | None:
    """How much quicker ours is."""
    return peer["seconds"] / row["seconds"] if peer else None


def step_table(groups) -> str:
    rows = []
    for row, peers in groups:
        if row["pass"] != "step":
            continue
        torch = peers.get("torch", {})
        rows.append((
            row["net"], row["minibatch"], row["target"], row["algorithm"],
            number(row["images_per_s"], "{:.1f}"), number(row["gflops"]), number(row["peak_share"], "{:.0%}"),
            number(row["tile_share"], "{:.0%}"),
            number(row["peak_memory"] / 1e9, "{:.2f}"),
            number(peers.get("reference", {}).get("images_per_s"), "{:.2f}"),
            number(torch.get("images_per_s"), "{:.1f}"),
            number(torch["peak_memory"] / 1e9 if torch else None, "{:.2f}"), number(ratio(row, torch), "{:.2f}"),
        ))  # fmt: skip
    header = ("network", "minibatch", "target", "algorithm", "images/s", "GFLOP/s", "of peak", "tile", "memory [GB]",
              "NumPy images/s", "PyTorch images/s", "PyTorch memory [GB]", "ours / PyTorch")  # fmt: skip
    return rows and "### Training step\n\n" + table(header, rows)


def layer_table(groups) -> str:
    rows = []
    for row, peers in groups:
        if row["pass"] == "step" or not row["flop"]:
            continue
        gflops = [number(peers.get(peer, {}).get("gflops")) for peer in PEERS]
        quiet = [number(info.get("quiet_share"), "{:.0%}") for info in (row, peers.get("onednn", {}))]
        rows.append((
            row["net"], row["layer"], row["pass"], row["minibatch"], row["algorithm"], row["target"],
            number(row["gflops"]), number(row["peak_share"], "{:.0%}"), number(row["tile_share"], "{:.0%}"), *gflops,
            number(ratio(row, peers.get("torch")), "{:.2f}"), number(ratio(row, peers.get("onednn")), "{:.2f}"),
            *quiet, number(quiet_ratio(row, peers.get("onednn")), "{:.2f}"),
        ))  # fmt: skip
    header = ("network", "layer", "pass", "minibatch", "algorithm", "target", "GFLOP/s", "of peak", "tile",
              "NumPy GFLOP/s", "PyTorch GFLOP/s", "oneDNN GFLOP/s", "ours / PyTorch", "ours / oneDNN",
              "quiet: ours", "oneDNN", "ours / oneDNN")  # fmt: skip
    return rows and "### Convolutions and fully connected layers\n\n" + table(header, rows)


def means(groups) -> str:
    """Geometric means over the layers of a network."""
    found = {}
    for row, peers in groups:
        if row["pass"] in PASSES and row["flop"]:
            kind = {"fc": "fully connected", "st": "first stages"}.get(row["layer"][:2], "convolutions")
            key = (row["net"], kind, row["minibatch"], row["pass"], row["algorithm"], row["target"])
            found.setdefault(key, []).append((row, peers))
    rows = []
    for key, pairs in found.items():
        ratios = [[ratio(row, peers.get(peer)) for row, peers in pairs] for peer in ("torch", "onednn")]
        ratios.append([quiet_ratio(row, peers.get("onednn")) for row, peers in pairs])
        shares = [[row.get(share) for row, _ in pairs] for share in ("peak_share", "quiet_share")]
        rows.append((*key, len(pairs), *(number(geometric(values), "{:.0%}") for values in shares),
                     *(number(geometric(values), "{:.2f}") for values in ratios)))  # fmt: skip
    header = ("network", "layers", "minibatch", "pass", "algorithm", "target", "count", "of peak (GFLOP/s)",
              "quiet", "ours / PyTorch", "ours / oneDNN", "quiet: ours / oneDNN")  # fmt: skip
    return rows and "Geometric means of the table above:\n\n" + table(header, rows)


def quiet_ratio(row, peer) -> float | None:
    """`ratio` on quiet cores; None if one of the two found too few quiet rounds."""
    rates = [info and info.get("quiet_gflops") for info in (row, peer)]
    return rates[0] / rates[1] if all(rates) else None


def choice_table(turns) -> str:
    """What Winograd gains where the plan chooses it."""
    found = {}
    for row in turns:
        found.setdefault((row["net"], row["minibatch"]), []).append(row)
    rows = []
    for key, chosen in found.items():
        least = min(chosen, key=lambda row: row["direct_ratio"])
        ratios = [row["direct_ratio"] for row in chosen]
        rows.append((*key, len(chosen), number(geometric(ratios), "{:.2f}"),
                     f"{min(ratios):.2f} ({least['layer']} {least['pass']})"))  # fmt: skip
    header = ("network", "minibatch", "passes by Winograd", "GFLOP/s over direct, geometric mean", "least")
    title = "### Where the plan chooses Winograd\n\nTurn by turn with direct convolution.\n\n"
    return rows and title + table(header, rows)


def geometric(values) -> float | None:
    """Geometric mean; None when a value is missing."""
    return None if None in values else exp(sum(map(log, values)) / len(values))


def memory_table(groups) -> str:
    rows = []
    for row, peers in groups:
        if row["pass"] == "step" or row["flop"]:
            continue
        rates = [peers[peer]["bytes_per_s"] / 1e9 if peer in peers else None for peer in ("reference", "torch")]
        rows.append((
            row["net"], row["layer"], row["pass"], row["minibatch"], row["target"],
            number(row["bytes_per_s"] / 1e9, "{:.1f}"), number(row["triad_share"], "{:.0%}"),
            *(number(rate, "{:.1f}") for rate in rates), number(ratio(row, peers.get("torch")), "{:.2f}"),
        ))  # fmt: skip
    header = ("network", "operation", "pass", "minibatch", "target", "GB/s", "of triad", "NumPy GB/s", "PyTorch GB/s",
              "ours / PyTorch")  # fmt: skip
    title = "### Bound by memory\n\nBytes count every array once; small arrays stay in cache and pass the triad.\n\n"
    return rows and title + table(header, rows)


def insert(page: Path, text: str) -> None:
    """Put the text between the marks of a page, at its end if it has none."""
    old = page.read_text() if page.exists() else "# Performance\n"
    block = f"{BEGIN}\n{text}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    if not begin:
        page.write_text(old.rstrip("\n") + "\n\n" + block)
        return
    _, end, after = rest.partition(END)
    if not end:
        raise SystemExit(f"{page}: has {BEGIN!r} but no {END!r}")
    page.write_text(before + block + after.lstrip("\n"))


# --- plot -------------------------------------------------------------------------------------------------------


def draw(groups, file: Path) -> None:
    """Roofline: what each pass of each layer reaches, over the work it has for each byte."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("the plot needs matplotlib: pip install matplotlib, or ask for --no-plot") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(row, peers.get("torch")) for row, peers in groups if row["flop"] and row.get("bytes")]
    if not rows:
        return
    peak = max(row["peak_gflops"] for row, _ in rows)
    triad = max(row["triad_bytes_per_s"] for row, _ in rows) / 1e9
    figure, axes = pyplot.subplots(figsize=(8, 5), dpi=150)
    intensities = [row["flop"] / row["bytes"] for row, _ in rows]
    low, high = min(*intensities, peak / triad) / 2, max(intensities) * 2
    axes.plot([low, peak / triad, high], [low * triad, peak, peak], color="black", linewidth=1,
              label=f"peak {peak:.0f} GFLOP/s, triad {triad:.0f} GB/s")  # fmt: skip
    for color, pass_name in zip(("tab:blue", "tab:orange", "tab:green"), PASSES):
        for who, filled in (("ours", True), ("PyTorch", False)):
            points = [(row["flop"] / row["bytes"], (row if who == "ours" else torch)["gflops"])
                      for row, torch in rows if row["pass"] == pass_name and (who == "ours" or torch)]  # fmt: skip
            if points:
                axes.scatter(*zip(*points), s=22, edgecolors=color, facecolors=color if filled else "none",
                             label=f"{pass_name}, {who}")  # fmt: skip
    axes.set(xscale="log", yscale="log", xlabel="work for each byte that must move [flop/byte]",
             ylabel="GFLOP/s", title="Convolutions and fully connected layers")  # fmt: skip
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file)


if __name__ == "__main__":
    main()
