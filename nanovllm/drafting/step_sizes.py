"""How many drafts the decode steps of an engine have: the sizes that are captured."""

from nanovllm.engine.schedule.batch import Size

# The most drafts of a step: with more, even right ones take longer than they save.
MOST_DRAFTS = 256


def numbers_of_drafts(most_drafts: int) -> list[int]:
    """How many drafts a step has room for: all, half, a quarter, ... of `most_drafts`."""
    return [most_drafts >> exponent for exponent in range(most_drafts.bit_length())]


def most_within(num_drafts: int, most_drafts: int) -> int:
    """The largest such number that is not above `num_drafts`, 0 if there is none."""
    return max((n for n in numbers_of_drafts(most_drafts) if n <= num_drafts), default=0)


def draft_sizes(most_drafts: int, largest: int) -> list[Size]:
    """Sizes to capture for steps with drafts."""
    sizes = []
    for number in numbers_of_drafts(most_drafts):
        top = min(largest, MOST_DRAFTS // number)
        powers = [1 << exponent for exponent in range(top.bit_length())]
        sizes += [Size(num_seqs, 1 + number) for num_seqs in sorted({*powers, top})]
    return sizes
