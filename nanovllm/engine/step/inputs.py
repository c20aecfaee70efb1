"""StepInputs: from a batch's sequences to host arrays with all that a rank must know of a step."""

from dataclasses import dataclass

import numpy as np

from nanovllm.engine.batch import Batch
from nanovllm.engine.sequence import PENDING, Sequence
from nanovllm.engine.step.device_table import TableChanges
from nanovllm.engine.step.ledger import Ledger
from nanovllm.engine.step.logprobs import Report, ReportInputs, prompt_report_inputs
from nanovllm.engine.step.transfer import Array


@dataclass(slots=True)
class PrefillInputs:
    """T tokens of B sequences; `Context` describes the first fields.

    `rows` are the sequences' rows in the device table, and `token_rows` those that the sampled
    tokens go to. `sample_rows` are the tokens to sample from, None for all; where forks share them,
    `shared_rows` says which of them each sample takes. `prompt_rows` are the tokens whose logits
    are reported. `copied_blocks` are pairs (from, to), copied after the T tokens are computed.
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

    @property
    def num_reported(self) -> int:
        """How many tokens' logits are reported."""
        return 0 if self.prompt_rows is None else len(self.prompt_rows)

    def needed_rows(self) -> Array | None:
        """The tokens whose hidden states are used, those that are reported first; None for all."""
        if self.sample_rows is None or self.prompt_rows is None:
            return self.sample_rows
        return np.append(self.prompt_rows, self.sample_rows)

    def pending(self) -> tuple[Array, Array]:
        """The places of tokens that are in flight, and the table rows that will hold them."""
        places = np.flatnonzero(self.input_ids == PENDING)
        return places, self.rows[np.searchsorted(self.cu_seqlens_q, places, side="right") - 1]


@dataclass(slots=True)
class StepInputs:
    """A step on the host: the changes of the device table, and a prefill's tokens.

    A decode step of `num_seqs` sequences reads everything else from the table. `width` is the
    number of columns of its block tables, 0 for a prefill that reads none. `report`, which rank 0
    alone has, says what is reported of the prompts.
    """

    num_seqs: int
    width: int
    changes: TableChanges
    prefill: PrefillInputs | None = None
    report: ReportInputs | None = None


def step_inputs(
    batch: Batch, block_size: int, ledger: Ledger, prompt_reports: list[Report]
) -> StepInputs:
    """The inputs of a batch's step; the ledger counts its changes as sent."""
    if not batch.is_prefill:
        return StepInputs(len(batch.seqs), *ledger.decode(batch.seqs))
    seqs = batch.seqs
    assert not any(seq.num_pending_tokens for seq in seqs[batch.num_decodes :])
    rows, token_rows, width, changes = ledger.prefill(batch.all_seqs, batch.sampling_seqs)
    prefill = PrefillInputs(
        *_tokens(seqs, block_size),
        rows=rows[: len(seqs)],
        token_rows=token_rows,
        copied_blocks=_copied_blocks(batch, block_size),
    )
    _mark_rows(prefill, batch)
    if not any(seq.num_cached_tokens for seq in seqs):
        width = 0
    return StepInputs(len(seqs), width, changes, prefill, prompt_report_inputs(prompt_reports))


def _tokens(seqs: list[Sequence], block_size: int) -> tuple[Array, Array, Array, Array, Array]:
    """Ids, positions and slots of the scheduled tokens, and where queries and keys end."""
    token_ids: list[int] = []
    positions, slots = [], []
    q_ends, k_ends = [0], [0]
    for seq in seqs:
        end = seq.num_cached_tokens + seq.num_scheduled_tokens
        token_ids += seq.token_ids[seq.num_cached_tokens : end]
        where = np.arange(seq.num_cached_tokens, end)
        positions.append(where)
        table = np.asarray(seq.block_table)
        slots.append(table[where // block_size] * block_size + where % block_size)
        q_ends.append(len(token_ids))
        k_ends.append(k_ends[-1] + end)
    return (
        np.array(token_ids, np.int64),
        np.concatenate(positions, dtype=np.int64),
        np.concatenate(slots, dtype=np.int64),
        np.array(q_ends, np.int32),
        np.array(k_ends, np.int32),
    )


def _mark_rows(prefill: PrefillInputs, batch: Batch) -> None:
    """Set which tokens are sampled from and reported."""
    starts = prefill.cu_seqlens_q.tolist()
    sample_rows: list[int] = []
    prompt_rows: list[int] = []
    place_of: dict[int, int] = {}  # in `sample_rows`, by seq_id
    for seq, start, end in zip(batch.seqs, starts, starts[1:], strict=False):
        prompt_rows += [start + place - seq.num_cached_tokens for place in seq.unreported_places]
        if seq.samples:
            place_of[seq.seq_id] = len(sample_rows)
            sample_rows.append(end - 1)
    prefill.sample_rows = np.array(sample_rows, np.int64)
    if prompt_rows:
        prefill.prompt_rows = np.array(prompt_rows, np.int64)
    if batch.forks:
        shared = [*place_of.values(), *(place_of[seq.seq_id] for seq, _ in batch.forks)]
        prefill.shared_rows = np.array(shared, np.int64)


def _copied_blocks(batch: Batch, block_size: int) -> Array | None:
    """The last blocks that forks copy, because they are not full."""
    tails = [
        (seq.block_table[-1], sibling.block_table[-1])
        for seq, sibling in batch.forks
        if seq.num_tokens % block_size
    ]
    return np.array(tails, np.int32).ravel() if tails else None


def warmup_inputs(num_tokens: int, longest: int) -> PrefillInputs:
    """A prefill of `num_tokens` tokens in sequences of up to `longest`, which stores nothing."""
    starts = np.append(np.arange(0, num_tokens, longest), num_tokens).astype(np.int32)
    no_rows = np.zeros(0, np.int64)
    return PrefillInputs(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) % longest,
        slot_mapping=np.full(num_tokens, -1),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        rows=no_rows,
        token_rows=no_rows,
    )
