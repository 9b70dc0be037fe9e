"""Writes the micro-kernel of tile.pxi in assembler, for x86-64 with FMA, as a C header: `header`.

Why assembler: a step of 24 multiply-adds, 4 loads and 6 broadcasts takes 12 cycles at best. gcc 12 adds 4 to 6
instructions, and moves between registers where it is made to unroll the loop or where the sum is cut; here a step has
one more. A core of its own does not notice, but one whose decoders two hardware threads share does, and the sums of few
steps: 1 to 3 % of most passes, 5 to 15 % of first layers and of images of 14 pixels a row.

The functions do the sums of `accumulate` in tile.pxi, in the same order. setup.py runs this file by its path, before
anything is built, so it imports nothing but the standard library.

Registers: rdi `Ends`, rsi `Reduction`; rdx rcx x and w where the loop over n1 begins, r10 r11 where the innermost one
does, rax rbx x and w of the step; r12 r13 distance of x from step to step and three times it, r8 r9 likewise from
vector to vector; rbp steps left; r14 r15 what is asked for, and its distance from step to step (where pixels may be any
distance apart: r12 r13 r14 that, three and five times). On the stack: SLOTS. Vector registers hold the sums, then the
filters of a step, then the values that are broadcast, in turn.
"""

from itertools import combinations, product
from typing import NamedTuple

UNROLL = 4
SAVED = ("rbx", "rbp", "r12", "r13", "r14", "r15")
ENDS = "start start_p start_v out out_p out_v add relu past".split()
REDUCTION = "n0 x0 w0 n1 x1 w1 n2 x2 w2 ahead next next_step next1 segments n_segments".split()
SEGMENT = "lo hi steps x w".split()
SLOTS = "n0 n1 n2 w0 next x w segment left".split()


def members(names, base):
    """Operands of things that take 8 bytes each and lie behind one another."""
    return {name: f"{8 * i}({base})" for i, name in enumerate(names)}


ends, over, slot = members(ENDS, "%rdi"), members(REDUCTION, "%rsi"), members(SLOTS, "%rsp")
segment = members(SEGMENT, "%rax")


class Kind(NamedTuple):
    """What a function can do beside its number of vectors and of pixels."""

    xp: int  # distance between pixels [float]; 0: any, and then x advances one float each step
    fetching: bool  # it asks for what later calls read
    near: bool  # w advances one vector each step
    cut: bool  # the sum is cut in segments


class Registers:
    """Names of the vector registers of a row of isa.py, and what differs between AVX2 and AVX-512."""

    def __init__(self, isa):
        self.isa, self.wide = isa, isa.width == 16
        self.first_filter = isa.tile_vectors * isa.tile_pixels
        self.first_value = self.first_filter + isa.tile_vectors

    def name(self, number):
        return f"%{'zmm' if self.wide else 'ymm'}{number}"

    def sum(self, p, v):
        return self.name(p * self.isa.tile_vectors + v)

    def filter(self, v):
        return self.name(self.first_filter + v)

    def value(self, p):
        return self.name(self.first_value + p % (self.isa.registers - self.first_value))

    def zero(self, register):
        return f"{'vpxord' if self.wide else 'vpxor'} {register}, {register}, {register}"

    def relu(self, register):
        """max(0, register), with zero in filter(0); of NaN, and of two zeros, the instruction gives the register's."""
        return f"vmaxps {register}, {self.filter(0)}, {register}"


def lines(texts):
    return "\n".join(texts)


def place(base, distance, three, i, displacement=0):
    """Operand: `i` times `distance` behind `base`; the register `three` holds three times the distance."""
    return f"{displacement or ''}({base}{('', f',{distance}', f',{distance},2', f',{three}')[i]})"


def pixel(kind, j, p):
    """Operand: x of pixel p, in step j of an unrolled loop."""
    if kind.xp:
        return place("%rax", "%r12", "%r13", j, 4 * kind.xp * p)
    return f"{4 * j or ''}(%rax{('', ',%r12', ',%r12,2', ',%r13', ',%r12,4', ',%r14')[p]})"


def copied(source, target, by="%rax"):
    return f"mov {source}, {by}\n mov {by}, {target}"


def in_bytes(source, register):
    return f"mov {source}, {register}\n shl $2, {register}"


def advance(target, distance):
    return f"{in_bytes(distance, '%rax')}\n add %rax, {target}"


def where(condition, text):
    return text if condition else ""


# --- the sum ------------------------------------------------------------------------------------------------------


def step(r, pixels, vectors, kind, j, displacement):
    """Step j of an unrolled loop: sum[p, v] += w[v] * x[p]."""
    text = [f"vmovups {place('%rbx', '%r8', '%r9', v, displacement)}, {r.filter(v)}" for v in range(vectors)]
    for p in pixels:
        text.append(f"vbroadcastss {pixel(kind, j, p)}, {r.value(p)}")
        text += [f"vfmadd231ps {r.value(p)}, {r.filter(v)}, {r.sum(p, v)}" for v in range(vectors)]
    return lines(text)


def steps(r, pixels, vectors, kind, count):
    """`count` steps, UNROLL or 1, and the way to the next ones."""
    text, vector = [], 4 * r.isa.width
    for j in range(count):
        text.append(step(r, pixels, vectors, kind, j, j * vector if kind.near else 0))
        text.append(where(not kind.near, f"add {slot['w0']}, %rbx"))
        text.append(where(kind.fetching, f"prefetcht0 {place('%r14', '%r15', '', j % 2)}"))
        if kind.fetching and (j % 2 or count == 1):
            text.append(f"lea (%r14,%r15,{j % 2 + 1}), %r14")
    text.append(where(kind.near, f"add ${count * vector}, %rbx"))
    text.append(f"lea (%rax,%r12,{count}), %rax" if kind.xp else f"add ${4 * count}, %rax")
    return lines(text)


def nest(r, pixels, vectors, kind):
    """The three loops of `Reduction`, from rdx and rcx on; n0 is in its slot."""
    return f"""
        {copied(over["n2"], slot["n2"])}
    3:  mov %rdx, %r10
        mov %rcx, %r11
        {copied(over["n1"], slot["n1"])}
        {where(kind.fetching, copied(over["next"], slot["next"]))}
    4:  mov %r10, %rax
        mov %r11, %rbx
        {where(kind.fetching, f"mov {slot['next']}, %r14")}
        mov {over["ahead"]}, %rbp
        test %rbp, %rbp
        je 5f
        prefetcht0 (%rax,%rbp,4)
        prefetcht0 64(%rax,%rbp,4)
        prefetcht0 128(%rax,%rbp,4)
        prefetcht0 192(%rax,%rbp,4)
    5:  mov {slot["n0"]}, %rbp
        sub ${UNROLL}, %rbp
        jl 7f
        .p2align 6
    6:  {steps(r, pixels, vectors, kind, UNROLL)}
        sub ${UNROLL}, %rbp
        jge 6b
    7:  add ${UNROLL}, %rbp
        jle 8f
    7:  {steps(r, pixels, vectors, kind, 1)}
        dec %rbp
        jne 7b
    8:  {where(kind.fetching, advance(slot["next"], over["next1"]))}
        {advance("%r10", over["x1"])}
        {advance("%r11", over["w1"])}
        decq {slot["n1"]}
        jne 4b
        {advance("%rdx", over["x2"])}
        {advance("%rcx", over["w2"])}
        decq {slot["n2"]}
        jne 3b
    """


def cut_nests(r, width, vectors, kind, name):
    """The loops for one segment after another: a jump to those for its pixels."""
    label, ranges = f".L{name}", list(combinations(range(width + 1), 2))
    entries = [(i // 8, i % 8) for i in range(8 * width)]
    return f"""
        mov %rdx, {slot["x"]}
        mov %rcx, {slot["w"]}
        {copied(over["segments"], slot["segment"])}
        {copied(over["n_segments"], slot["left"])}
        cmpq $0, {slot["left"]}
        jle 9f
    2:  mov {slot["segment"]}, %rax
        {copied(segment["steps"], slot["n0"], "%rbp")}
        {in_bytes(segment["x"], "%rdx")}
        add {slot["x"]}, %rdx
        {in_bytes(segment["w"], "%rcx")}
        add {slot["w"]}, %rcx
        mov ${width}, %ebp
        mov {segment["hi"]}, %rbx
        cmp %rbp, %rbx
        cmovg %rbp, %rbx
        mov {segment["lo"]}, %rbp
        lea (%rbx,%rbp,8), %rbp
        lea {label}_table(%rip), %rax
        movslq (%rax,%rbp,4), %rbp
        add %rbp, %rax
        notrack jmp *%rax
        {lines(f"{label}_{lo}_{hi}: {nest(r, range(lo, hi), vectors, kind)} jmp {label}_next" for lo, hi in ranges)}
    {label}_next:
        addq ${8 * len(SEGMENT)}, {slot["segment"]}
        decq {slot["left"]}
        jne 2b
        .pushsection .rodata
        .p2align 2
    {label}_table:
        {lines(f".long {label}_{f'{e[0]}_{e[1]}' if e in ranges else 'next'} - {label}_table" for e in entries)}
        .popsection
    """


def sum_of(r, width, vectors, kind, name):
    """The sum, in registers."""
    whole = f"{copied(over['n0'], slot['n0'])} {nest(r, range(width), vectors, kind)}"
    return f"""
        cmpq $0, {over["n1"]}
        jle 9f
        cmpq $0, {over["n2"]}
        jle 9f
        {in_bytes(over["x0"] if kind.xp else "%r9", "%r12")}
        lea (%r12,%r12,2), %r13
        {where(not kind.xp, "lea (%r12,%r12,4), %r14")}
        shl $2, %r8
        lea (%r8,%r8,2), %r9
        {where(not kind.near, in_bytes(over["w0"], "%rax"))}
        {where(not kind.near, f"mov %rax, {slot['w0']}")}
        {where(kind.fetching, in_bytes(over["next_step"], "%r15"))}
        {cut_nests(r, width, vectors, kind, name) if kind.cut else whole}
    9:
    """


# --- where it begins and ends ---------------------------------------------------------------------------------------


def with_all(r, width, vectors, there, line):
    """`line(place, sum)` for every sum; `there`: member of `Ends`, with its distances of pixels and of vectors."""
    text = []
    for p in range(width):
        text += [line(place("%rax", "%r15", "%r13", v), r.sum(p, v)) for v in range(vectors)]
        text.append("add %r14, %rax")
    return f"""
        mov {ends[there]}, %rax
        {in_bytes(ends[f"{there}_p"], "%r14")}
        {in_bytes(ends[f"{there}_v"], "%r15")}
        lea (%r15,%r15,2), %r13
        {lines(text)}
    """


def begin(r, width, vectors):
    """Sums begin at zero, or at what lies at ends.start."""
    return f"""
        cmpq $0, {ends["start"]}
        je 1f
        {with_all(r, width, vectors, "start", lambda at, s: f"vmovups {at}, {s}")}
        jmp 2f
    1:  {lines(r.zero(r.sum(p, v)) for p, v in product(range(width), range(vectors)))}
    2:
    """


def end(r, width, vectors):
    """Sums are added to what lies at ends.out, relu'd and stored past the caches or not, as ends says."""
    return f"""
        cmpq $0, {ends["add"]}
        je 1f
        {with_all(r, width, vectors, "out", lambda at, s: f"vaddps {at}, {s}, {s}")}
    1:  cmpq $0, {ends["relu"]}
        je 1f
        {r.zero(r.filter(0))}
        {lines(r.relu(r.sum(p, v)) for p, v in product(range(width), range(vectors)))}
    1:  cmpq $0, {ends["past"]}
        jne 1f
        {with_all(r, width, vectors, "out", lambda at, s: f"vmovups {s}, {at}")}
        jmp 2f
    1:  {with_all(r, width, vectors, "out", lambda at, s: f"vmovntps {s}, {at}")}
    2:
    """


# --- the header -----------------------------------------------------------------------------------------------------


def function(r, width, vectors, kind, name):
    """rdi, rsi, rdx, rcx, r8, r9: ends, over, x, w, the distance of vectors, that of pixels (where it may be any)."""
    return f"""
        .pushsection .text
        .globl {name}
        .hidden {name}
        .type {name}, @function
        .p2align 6
    {name}:
        endbr64
        {lines(f"push %{register}" for register in SAVED)}
        sub ${8 * len(SLOTS)}, %rsp
        {begin(r, width, vectors)}
        {sum_of(r, width, vectors, kind, name)}
        {end(r, width, vectors)}
        add ${8 * len(SLOTS)}, %rsp
        {lines(f"pop %{register}" for register in reversed(SAVED))}
        vzeroupper
        ret
        .size {name}, . - {name}
        .popsection
    """


def kinds(isa):
    """In the order of the table: 4 (xp == b) + 2 fetching + near; then sums that are cut, of xp 1, b and any."""
    whole = product((1, isa.width), (False, True), (False, True))
    cut = (Kind(xp, fetching=False, near=True, cut=True) for xp in (1, isa.width, 0))
    return [*(Kind(*choice, cut=False) for choice in whole), *cut]


def header(isa):
    """The text of tile_x86.h for a row of isa.py: the functions, and their table by kind, vectors and width."""
    shapes = list(product(enumerate(kinds(isa)), range(1, isa.tile_vectors + 1), range(1, isa.tile_pixels + 1)))
    names = [f"pcl_tile_{number}_{vectors}_{width}" for (number, _), vectors, width in shapes]
    text = lines(function(Registers(isa), width, vectors, kind, name)
                 for name, ((_, kind), vectors, width) in zip(names, shapes, strict=True))  # fmt: skip
    structs = {"Ends": ENDS, "Reduction": REDUCTION, "Segment": SEGMENT}
    asserts = lines(f'_Static_assert(offsetof({struct}, {name}) == {8 * i}, "see tile_x86.py");'
                    for struct, members in structs.items() for i, name in enumerate(members))  # fmt: skip
    quoted = [f'"{line.strip()}\\n"' for line in text.splitlines() if line.strip()]
    return f"""/* Written by tile_x86.py. */
#define PCL_ASSEMBLED 1
{asserts}
typedef void TileFunction(const Ends *, const Reduction *, const float *x, const float *w, ptrdiff_t wv, ptrdiff_t xp);
extern TileFunction {", ".join(names)};
static TileFunction *const tile_functions[] = {{{", ".join(names)}}};
PCL_INLINE void assembled_tile(int kind, int width, int vectors, const Ends *ends, const float *x, ptrdiff_t xp,
                               const float *w, ptrdiff_t wv, const Reduction *over) {{
    tile_functions[(kind * PCL_VECTORS + vectors - 1) * PCL_TILE + width - 1](ends, over, x, w, wv, xp);
}}
__asm__(
{lines(quoted)}
);
"""
