"""Caches with states, and sequences that are computed in them step by step, for several tests."""

from collections.abc import Sequence as List

from audits import audit_caches

from nanovllm.engine.cache.caches import CacheLayout
from nanovllm.engine.cache.caches_with_states import CachesWithStates
from nanovllm.engine.cache.state_slots import StateLayout
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.scheduler import class_of_caches
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

SIZE, INTERVAL = 4, 8
WITH_KV, ALONE = (None,), ()


def make_caches(
    windows: tuple[int | None, ...] = WITH_KV, slots_per_sequence: int = 1, num_checkpoints: int = 4
) -> CachesWithStates:
    """Caches of 50 blocks for three sequences at a time."""
    states = StateLayout(slots_per_sequence, num_checkpoints, INTERVAL)
    layout = CacheLayout(windows, states)
    caches = class_of_caches(layout)(layout, 50, SIZE, 3, num_checkpoints > 0)
    assert isinstance(caches, CachesWithStates)
    return caches


def make_seq(tokens: List[int]) -> Sequence:
    """A sequence that goes on for long."""
    return Sequence([*tokens], SamplingParams(max_tokens=99))


def admit(caches: CachesWithStates, tokens: List[int]) -> Sequence:
    """A sequence that runs."""
    seq = make_seq(tokens)
    assert caches.admit(seq)
    seq.status = SequenceStatus.RUNNING
    return seq


def step(caches: CachesWithStates, seq: Sequence, num_tokens: int | None = None) -> Batch:
    """Compute tokens of `seq`: all that are left, or the given number."""
    seq.num_scheduled_tokens = num_tokens or seq.num_uncached_tokens
    assert caches.grow(seq, seq.num_cached_tokens + seq.num_scheduled_tokens)
    batch = Batch([seq], is_prefill=True)
    caches.plan(batch)
    return batch


def end(caches: CachesWithStates, batch: Batch, *others: Sequence) -> None:
    """Count a step as computed; `others` run too."""
    for seq in batch.seqs:
        seq.num_cached_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 0
        caches.publish(seq, seq.num_cached_tokens)
        audit_caches(caches, [seq, *others])


def run(caches: CachesWithStates, tokens: List[int], *chunks: int) -> Sequence:
    """A sequence that is computed in chunks, the last of all that is left."""
    seq = admit(caches, tokens)
    for num_tokens in (*chunks, None):
        end(caches, step(caches, seq, num_tokens))
    return seq


def decode(caches: CachesWithStates, seq: Sequence, tokens: List[int], *others: Sequence) -> None:
    """Compute one token after another."""
    for token_id in tokens:
        seq.token_ids.append(token_id)
        end(caches, step(caches, seq), *others)


def run_and_free(caches: CachesWithStates, tokens: List[int], *chunks: int) -> None:
    """Compute a sequence in chunks, and free it."""
    caches.free(run(caches, tokens, *chunks))
    audit_caches(caches, [])


def num_restored(caches: CachesWithStates, tokens: List[int]) -> int:
    """How many tokens a sequence begins with; it is computed, and freed."""
    seq = admit(caches, tokens)
    found = seq.num_cached_tokens
    end(caches, step(caches, seq))
    caches.free(seq)
    return found
