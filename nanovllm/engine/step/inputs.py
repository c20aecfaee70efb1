"""From a batch's sequences to the arrays of a step: all that a rank must know of it.

They go to the other ranks as they are.
"""

from dataclasses import dataclass

import numpy as np

from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import PENDING
from nanovllm.engine.step.device_table import Account
from nanovllm.engine.step.transfer import Array


@dataclass(slots=True)
class PrefillInputs:
    """T tokens of B sequences; `Context` says what the first fields mean.

    `sample_rows` are the tokens that are sampled from, None for all of them; `shared_rows` which of
    these each sequence takes, if forks share them. Of `prompt_rows` the logits are told.
    `copied_blocks` are pairs, from and to, that are copied when T is computed. On the device,
    `rows` are the sequences', and `token_rows` where the sampled tokens go.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens_q: Array
    cu_seqlens_k: Array
    rows: Array
    token_rows: Array
    sample_rows: Array | None = None
    shared_rows: Array | None = None
    prompt_rows: Array | None = None
    copied_blocks: Array | None = None

    def pending(self) -> tuple[Array, Array]:
        """Where tokens stand that the step before yields, and the rows that they go to."""
        places = np.flatnonzero(self.input_ids == PENDING)
        return places, self.rows[np.searchsorted(self.cu_seqlens_q, places, side="right") - 1]


@dataclass(slots=True)
class StepInputs:
    """A step, on the host. A decode step stands in the rows on the device, but for what is new.

    First of all, `words` are written to their `places` there. `width` is that of the block tables,
    0 for a prefill that reads none.
    """

    num_seqs: int
    width: int
    places: Array
    words: Array
    prefill: PrefillInputs | None = None


def prefill_inputs(batch: Batch, block_size: int, account: Account) -> StepInputs:
    """Each sequence's scheduled tokens, one after the other."""
    seqs = batch.seqs
    token_ids: list[int] = []
    positions, slots, prompt_rows = [], [], []
    sample_rows: list[int] = []
    samples: dict[int, int] = {}  # by seq_id: which of them
    cu_seqlens_q, cu_seqlens_k = [0], [0]
    for seq in seqs:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        prompt_rows += [len(token_ids) + row - seq.num_cached_tokens for row in seq.untold_rows]
        token_ids += seq.token_ids[seq.num_cached_tokens : end]
        where = np.arange(seq.num_cached_tokens, end)
        positions.append(where)
        table = np.asarray(seq.block_table)
        slots.append(table[where // block_size] * block_size + where % block_size)
        cu_seqlens_q.append(len(token_ids))
        cu_seqlens_k.append(cu_seqlens_k[-1] + end)
        if seq.samples:
            samples[seq.seq_id] = len(sample_rows)
            sample_rows.append(len(token_ids) - 1)
    shared_rows = [*samples.values(), *(samples[seq.seq_id] for seq, _ in batch.forks)]
    tails = [
        (seq.block_table[-1], follower.block_table[-1])
        for seq, follower in batch.forks
        if seq.num_tokens % block_size
    ]
    assert not any(seq.num_pending_tokens for seq in seqs[batch.num_decodes :])
    rows, token_rows, news = account.prefill(batch.all_seqs, batch.sampling_seqs)
    prefill = PrefillInputs(
        input_ids=np.array(token_ids, np.int64),
        positions=np.concatenate(positions, dtype=np.int64),
        slot_mapping=np.concatenate(slots, dtype=np.int64),
        cu_seqlens_q=np.array(cu_seqlens_q, np.int32),
        cu_seqlens_k=np.array(cu_seqlens_k, np.int32),
        rows=rows[: len(seqs)],
        token_rows=token_rows,
        sample_rows=np.array(sample_rows, np.int64),
        shared_rows=np.array(shared_rows, np.int64) if batch.forks else None,
        prompt_rows=np.array(prompt_rows, np.int64) if prompt_rows else None,
        copied_blocks=np.array(tails, np.int32).ravel() if tails else None,
    )
    if not any(seq.num_cached_tokens for seq in seqs):
        news = news._replace(width=0)
    return StepInputs(len(seqs), *news, prefill)


def decode_inputs(batch: Batch, account: Account) -> StepInputs:
    """The last token of each sequence."""
    return StepInputs(len(batch.seqs), *account.decode(batch.seqs))


def warmup_inputs(num_tokens: int, longest: int) -> PrefillInputs:
    """The largest prefill: `num_tokens` tokens in sequences of `longest`, with nowhere to go."""
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    nothing = np.zeros(0, np.int64)
    return PrefillInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) % longest,
        slot_mapping=np.full(num_tokens, -1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        rows=nothing,
        token_rows=nothing,
    )
