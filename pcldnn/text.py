"""Numbers and tables as text, for plans, profiles and reports."""


def align(rows, left: int) -> list[str]:
    """Rows of cells as lines; the first `left` columns begin together, the others end together."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(cell.ljust(w) if i < left else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]


def counted(number: int, one: str, many: str | None = None) -> str:
    """2, "rank" as "2 ranks"."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def format_bytes(count: float) -> str:
    """1536 as "1.5 kB", in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
