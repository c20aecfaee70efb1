"""From the sequences that a step samples for to the sampler's tensors. Only rank 0 does this."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step.transfer import Array, upload
from nanovllm.kernels.plain.draw import Cuts
from nanovllm.kernels.plain.ranking import are_few
from nanovllm.layers.filters import Entries, Filters, Penalties
from nanovllm.sampling_params import SamplingParams

NARROWED_LOGITS = {"cpu": 1 << 23, "cuda": 1 << 26}  # at most, at a time: copied in float32
COLDEST = 1e-30  # below it logits that differ at all are as good as infinitely far apart
HOTTEST = 1e37  # above it the sampler's products overflow; here logits have no weight any more


@dataclass(slots=True)
class SamplingInputs:
    """Of B rows: temperatures and keys [B], None if all are greedy; and what narrows some rows.

    Those that are drawn alike come together, a few at a time, so that their copies take a bounded
    memory.
    """

    temperatures: torch.Tensor | None
    keys: torch.Tensor | None
    filters: list[Filters]


class SeenTokens:
    """The tokens of one sequence, each once, and how often it is in the output. Grows with it."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of the sequence, that are counted
        self.places: dict[int, int] = {}
        self.ids = np.zeros(256, np.int64)
        self.counts = np.zeros(256, np.int32)

    def update(self, seq: Sequence) -> None:
        """Count the tokens that are new."""
        if seq.num_tokens < self.num_tokens:  # one was taken back
            self.__init__()  # type: ignore[misc]
        for index in range(self.num_tokens, seq.num_tokens):
            token_id = seq.token_ids[index]
            place = self.places.setdefault(token_id, len(self.places))
            if place == len(self.ids):
                self.ids = np.resize(self.ids, 2 * place)
                self.counts = np.append(self.counts, np.zeros(place, np.int32))
            self.ids[place] = token_id
            self.counts[place] += index >= seq.num_prompt_tokens
        self.num_tokens = seq.num_tokens

    def __len__(self) -> int:
        return len(self.places)


def sampling_inputs(
    seqs: list[Sequence],
    vocab_size: int,
    device: torch.device,
    choices: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> SamplingInputs:
    """What the sampler needs for one token of each of `seqs`.

    Their temperatures and keys are `choices`, where the device has them.
    """
    temperatures = keys = None
    if any(seq.temperature > 0 for seq in seqs):
        temperatures, keys = choices or (
            upload(np.array([temperature_of(seq) for seq in seqs], np.float32), device),
            upload(np.array([noise_key(seq) for seq in seqs]), device),
        )
    alike: dict[tuple[bool, ...], list[int]] = {}
    for row, seq in enumerate(seqs):
        if seq.is_narrowed:
            alike.setdefault(_way(seq.params, vocab_size), []).append(row)
    size = _rows_at_a_time(vocab_size, device)
    parts = [
        rows[start : start + size] for rows in alike.values() for start in range(0, len(rows), size)
    ]
    filters = [_filters(part, [seqs[row] for row in part], vocab_size, device) for part in parts]
    return SamplingInputs(temperatures, keys, filters)


def temperature_of(seq: Sequence) -> float:
    """One whose products and quotients with logits do not overflow in float32; 0 stays 0."""
    return min(max(seq.temperature, COLDEST), HOTTEST) if seq.temperature > 0 else 0.0


def warmup_filters(num_rows: int, vocab_size: int, device: torch.device) -> list[Filters]:
    """What takes the most memory: nearly all tokens as candidates, of the copies that are largest.

    Penalties need one in float32, which takes the place of another; all rows need no other. What
    lists of tokens take comes on top, where kernels take less than plain PyTorch. The last row is
    there for its kernel to be compiled.
    """
    filters = []
    size = _rows_at_a_time(vocab_size, device)
    many = vocab_size - 1
    for number, penalty, top_k in ((num_rows, 1.1, many), (num_rows - 1, 1.0, many), (1, 1.0, -1)):
        params = SamplingParams(top_k=top_k, top_p=0.99, repetition_penalty=penalty)
        seqs = [Sequence([0], params) for _ in range(min(number, size))]
        filters += sampling_inputs(seqs, vocab_size, device).filters
    return filters


def noise_key(seq: Sequence) -> int:
    """What decides a sequence's next draw: its seed and position, nothing else. 64 bits, signed.

    `kernels/plain/noise.py` defines it, and computes it on the device.
    """
    digest = xxhash.xxh64_intdigest(seq.num_tokens.to_bytes(8, "little"), seed=seq.seed)
    return digest - (1 << 63)


def _rows_at_a_time(vocab_size: int, device: torch.device) -> int:
    """How many rows are narrowed together."""
    return max(1, NARROWED_LOGITS[device.type] // vocab_size)


def _filters(
    rows: list[int], seqs: list[Sequence], vocab_size: int, device: torch.device
) -> Filters:
    filters = Filters(upload(np.array(rows), device))
    allowed = [(r, ids) for r, seq in enumerate(seqs) if (ids := seq.params.allowed_token_ids)]
    if allowed:
        rows_with_list = upload(np.array([row for row, _ in allowed]), device)
        filters.allowed = rows_with_list, _entries(allowed, device)
    forbidden = []
    for row, seq in enumerate(seqs):
        ids = seq.forbidden_token_ids()
        if ids and not ids.issuperset(seq.params.allowed_token_ids or {-1}):  # or nothing is left
            forbidden.append((row, ids))
    if forbidden:
        filters.forbidden = _entries(forbidden, device)
    biased = [(row, seq.params.logit_bias) for row, seq in enumerate(seqs) if seq.params.logit_bias]
    if biased:
        values = np.array([value for _, bias in biased for value in bias.values()], np.float32)
        filters.biases = _entries(biased, device), upload(values, device)
    if any(seq.params.penalizes for seq in seqs):
        filters.penalties = _penalties(seqs, device)
    if seqs[0].params.cuts:
        filters.cuts = _cuts([seq.params for seq in seqs], vocab_size, device)
    return filters


def _entries(ids_of_rows: Iterable[tuple[int, Iterable[int]]], device: torch.device) -> Entries:
    pairs = [(row, token_id) for row, ids in ids_of_rows for token_id in ids]
    rows, ids = np.array(pairs, np.int64).T
    return upload(np.ascontiguousarray(rows), device), upload(np.ascontiguousarray(ids), device)


def _penalties(seqs: list[Sequence], device: torch.device) -> Penalties:
    seen: list[SeenTokens | None] = []
    for seq in seqs:
        if seq.params.penalizes:
            if seq.seen_tokens is None:
                seq.seen_tokens = SeenTokens()
            seq.seen_tokens.update(seq)
        seen.append(seq.seen_tokens)
    width = max(len(tokens) for tokens in seen if tokens is not None)
    ids = np.zeros((len(seqs), width), np.int64)
    counts = np.zeros((len(seqs), width), np.int32)
    for row, tokens in enumerate(seen):
        if tokens is not None:
            ids[row], counts[row] = tokens.ids[0], tokens.counts[0]
            ids[row, : len(tokens)] = tokens.ids[: len(tokens)]
            counts[row, : len(tokens)] = tokens.counts[: len(tokens)]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    columns = (_column((getattr(seq.params, name) for seq in seqs), device) for name in names)
    return Penalties(upload(ids, device), upload(counts, device), *columns)


def _way(params: SamplingParams, vocab_size: int) -> tuple[bool, ...]:
    """How a row is drawn: whether it is cut, from candidates, that are few, by a top_k."""
    has_k = params.cuts and 0 < params.top_k < vocab_size
    few = has_k and are_few(params.top_k, vocab_size)
    return params.cuts, few or (has_k and params.top_p < 1), few, has_k


def _cuts(params: list[SamplingParams], vocab_size: int, device: torch.device) -> Cuts:
    cuts = Cuts()
    if any(p.min_p > 0 for p in params):
        cuts.min_p = _column((p.min_p for p in params), device)
    if any(p.top_p < 1 for p in params):
        cuts.top_p = _column((p.top_p for p in params), device)
    top_k = [min(p.top_k, vocab_size) if p.top_k > 0 else vocab_size for p in params]
    if min(top_k) < vocab_size:
        cuts.top_k = upload(np.array(top_k)[:, None], device)
    if _way(params[0], vocab_size)[1]:
        cuts.num_candidates = max(top_k)
    return cuts


def _column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    array: Array = np.fromiter(values, np.float32)
    return upload(array[:, None], device)
