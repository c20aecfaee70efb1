"""Exchange few numbers between kernels of several GPUs, through memory that they share.

Each rank has a buffer that the other ranks' GPUs write to. All ranks run the same kernel, and its
program p exchanges numbers only with program p of the other ranks, through its region of the
buffers. In exchange e of a region, a program

1. writes its numbers to slot e % 2 of its region in every other rank's buffer (`send`),
2. reads the same slot of its own buffer until the numbers of all other ranks are there, and marks
   their places as EMPTY again (`receive`).

A number has arrived when its place is not EMPTY, because EMPTY is never sent. So no flags are
needed, and the order in which writes arrive does not matter.

Two slots are enough, and no rank has to wait at the end. A rank writes to slot e % 2 again in
exchange e + 2. By then it has read this rank's numbers of exchange e + 1, and this rank sent these
in a later kernel than the one in which it read and emptied its slot of exchange e.

Every rank launches the same exchanges in the same order. Between two exchanges a host may wait for
its GPU, to load a kernel or to allocate memory: the kernels that run there need only exchanges that
the other hosts have launched, or will launch without waiting for a later exchange.

The counts of exchanges, one for each region, are in memory, so CUDA graphs can replay a kernel. The
word before them becomes nonzero when a kernel finds that a rank has ended; later kernels then do
not wait.

A program waits for the program of the same number on other GPUs. There are at most REGIONS
programs, few enough to run at the same time, and they start in the same order everywhere.
"""

import triton
import triton.language as tl

REGIONS = 512  # the most programs of a kernel
REGION_BYTES = 1 << 14  # for one rank's numbers for one program
SLOTS = 2
EMPTY_HALF = 0x8000  # memory is filled with this: a negative zero of 16 bits
EMPTY_16 = tl.constexpr(-0x8000)
EMPTY_32 = tl.constexpr(0x80008000 - (1 << 32))  # float32: a negative number next to zero
# Reads between two checks whether a rank has ended: about 10 ms. The flag is in the host's memory,
# where reads of one address take about a microsecond each, one after the other. With a check after
# every 128 reads, one GPU waited for the checks of the other and then checked too, and a sum took 1
# ms instead of 6 us.
CHECK_SPINS = tl.constexpr(1 << 14)


def buffer_bytes(size: int) -> int:
    """The size of a rank's buffer, for `size` ranks."""
    return REGIONS * SLOTS * size * REGION_BYTES


@triton.jit
def words_of(x):  # type: ignore[no-untyped-def]
    """The bits of x, with zeros in place of EMPTY."""
    HALF: tl.constexpr = x.dtype.primitive_bitwidth == 16  # noqa: N806
    words = x.to(tl.int16 if HALF else tl.int32, bitcast=True)
    return tl.where(words == (EMPTY_16 if HALF else EMPTY_32), tl.zeros_like(words), words)


@triton.jit
def send(  # type: ignore[no-untyped-def]
    words, at, inside, places_ptr, counts_ptr, program,
    RANK: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """Write words to the program's region of all other ranks, at the places `at` < REGION.

    Returns the place where the other ranks' words arrive, REGION words of each rank, and whether a
    rank has ended.
    """
    count = tl.load(counts_ptr + 1 + program)
    ended = tl.load(counts_ptr)  # as an earlier kernel has found
    slot = (program * 2 + count % 2) * SIZE * REGION
    for other in tl.static_range(SIZE):
        if other != RANK:
            place = tl.load(places_ptr + other).to(tl.pointer_type(words.dtype))
            place = tl.multiple_of(place, 16) + slot + RANK * REGION
            tl.store(place + at, words, mask=inside)
    tl.debug_barrier()  # every thread reads the count before one of them writes it
    tl.store(counts_ptr + 1 + program, count + 1)
    own = tl.load(places_ptr + RANK).to(tl.pointer_type(words.dtype))
    return tl.multiple_of(own, 16) + slot, ended


@triton.jit
def receive(  # type: ignore[no-untyped-def]
    place, ended, words, at, inside, places_ptr, counts_ptr,
    OTHER: tl.constexpr, SIZE: tl.constexpr, REGION: tl.constexpr,
):  # fmt: skip
    """Receive another rank's words, as many as `words`. `send` returned `place` and `ended`.

    If a rank has ended, the result is undefined, and later kernels do not wait. Threads may read
    this at different times, but leave the loop together, because its condition is a maximum over
    all threads.
    """
    EMPTY: tl.constexpr = EMPTY_16 if words.dtype.primitive_bitwidth == 16 else EMPTY_32  # noqa: N806
    sent = place + OTHER * REGION + at
    received = tl.load(sent, mask=inside, other=0, volatile=True)
    missing = tl.max(((received == EMPTY) & (ended == 0)).to(tl.int32), axis=0)
    spins = 0
    while missing > 0:
        spins += 1
        if spins % CHECK_SPINS == 0:
            ended_ptr = tl.load(places_ptr + SIZE).to(tl.pointer_type(tl.int32))
            flag = tl.load(ended_ptr + 0 * at, mask=at == 0, other=0, volatile=True)  # one thread
            ended = tl.max(flag, axis=0)
            tl.store(counts_ptr, ended)
        received = tl.load(sent, mask=inside, other=0, volatile=True)
        missing = tl.max(((received == EMPTY) & (ended == 0)).to(tl.int32), axis=0)
    tl.store(sent, tl.full(words.shape, EMPTY, words.dtype), mask=inside)
    return received
