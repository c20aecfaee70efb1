"""Interruptions: sequences that are aborted, or start over. Imported at the first one."""

from collections import deque
from collections.abc import Iterable

from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus


def abort(seqs: Iterable[Sequence], waiting: deque[Sequence]) -> list[Sequence]:
    """End unfinished sequences and their siblings; returns those that were running."""
    running = []
    for seq in seqs:
        for sibling in seq.siblings:
            sibling.finish("abort")
        seq.siblings = []
        if seq.status is SequenceStatus.WAITING:
            waiting.remove(seq)
        elif seq.status is SequenceStatus.RUNNING:
            running.append(seq)
        seq.finish("abort")
    return running


def start_over(waiting: Iterable[Sequence]) -> None:
    """Begin with nothing computed, after an interrupt that may have left anything half done.

    If a sequence's last token ends it, but this was not recorded, it is sampled again.
    """
    for seq in waiting:
        seq.siblings = []  # each starts over itself
        seq.drop_pending()
        seq.status = SequenceStatus.WAITING
        seq.release_cache()
        if len(seq.token_ids) > seq.num_prompt_tokens and (
            seq.token_ids[-1] in seq.stop_token_ids
            or len(seq.token_ids) >= seq.max_num_tokens
            or seq.follow() is not None
        ):
            seq.token_ids.pop()
