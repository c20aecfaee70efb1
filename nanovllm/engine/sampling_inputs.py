"""From the sequences that a step samples for to the sampler's tensors. Only rank 0 does this."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import xxhash

from nanovllm.engine.inputs import Array, upload
from nanovllm.engine.sequence import Sequence
from nanovllm.layers.filters import Cuts, Entries, Filters, Penalties
from nanovllm.sampling_params import SamplingParams

NARROWED_LOGITS = 1 << 23  # at most, at a time: what narrows them takes some 50 bytes for each
COLDEST = 1e-30  # below it logits that differ at all are as good as infinitely far apart
HOTTEST = 1e37  # above it the sampler's products overflow; here logits have no weight any more


@dataclass(slots=True)
class SamplingInputs:
    """Of B rows: temperatures and keys [B], None if all are greedy; and what narrows some rows.

    Those come a few at a time, so that their copies take a bounded memory.
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


def sampling_inputs(seqs: list[Sequence], vocab_size: int, device: torch.device) -> SamplingInputs:
    """What the sampler needs for one token of each of `seqs`."""
    temperatures = keys = None
    if any(seq.temperature > 0 for seq in seqs):
        temperatures = upload(_temperatures(seqs), device)
        keys = upload(np.array([noise_key(seq) for seq in seqs]), device)
    rows = [row for row, seq in enumerate(seqs) if seq.is_narrowed]
    size = rows_at_a_time(vocab_size)
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    filters = [_filters(part, [seqs[row] for row in part], vocab_size, device) for part in parts]
    return SamplingInputs(temperatures, keys, filters)


def _temperatures(seqs: list[Sequence]) -> Array:
    """In float32, whose products and quotients with logits do not overflow; 0 stays 0."""
    asked = np.array([seq.temperature for seq in seqs])
    return np.where(asked > 0, asked.clip(COLDEST, HOTTEST), 0.0).astype(np.float32)


def rows_at_a_time(vocab_size: int) -> int:
    """How many rows are narrowed together."""
    return max(1, NARROWED_LOGITS // vocab_size)


def warmup_filters(num_rows: int, vocab_size: int, device: torch.device) -> list[Filters]:
    """What takes the most memory: a top_p that needs every token, if all are alike."""
    params = SamplingParams(top_p=0.99, top_k=-1, repetition_penalty=1.1)
    seqs = [Sequence([0], params) for _ in range(min(num_rows, rows_at_a_time(vocab_size)))]
    return sampling_inputs(seqs, vocab_size, device).filters


def noise_key(seq: Sequence) -> int:
    """What decides a sequence's next draw: its seed and position, nothing else. 64 bits, signed."""
    digest = xxhash.xxh64_intdigest(seq.num_tokens.to_bytes(8, "little"), seed=seq.seed)
    return digest - (1 << 63)


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
        filters.penalties = _penalties(seqs, vocab_size, device)
    cut = [(row, seq) for row, seq in enumerate(seqs) if seq.params.cuts]
    if cut:
        filters.cuts = _cuts(cut, vocab_size, device)
    return filters


def _entries(ids_of_rows: Iterable[tuple[int, Iterable[int]]], device: torch.device) -> Entries:
    pairs = [(row, token_id) for row, ids in ids_of_rows for token_id in ids]
    rows, ids = np.array(pairs, np.int64).T
    return upload(np.ascontiguousarray(rows), device), upload(np.ascontiguousarray(ids), device)


def _penalties(seqs: list[Sequence], vocab_size: int, device: torch.device) -> Penalties:
    seen: list[SeenTokens | None] = []
    for seq in seqs:
        if seq.params.penalizes:
            if seq.seen_tokens is None:
                seq.seen_tokens = SeenTokens()
            seq.seen_tokens.update(seq)
        seen.append(seq.seen_tokens)
    width = max(len(tokens) for tokens in seen if tokens is not None)
    ids = np.full((len(seqs), width), vocab_size, np.int64)
    counts = np.zeros((len(seqs), width), np.int32)
    for row, tokens in enumerate(seen):
        if tokens is not None:
            ids[row, : len(tokens)] = tokens.ids[: len(tokens)]
            counts[row, : len(tokens)] = tokens.counts[: len(tokens)]
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    columns = (_column((getattr(seq.params, name) for seq in seqs), device) for name in names)
    return Penalties(upload(ids, device), upload(counts, device), *columns)


def _cuts(cut: list[tuple[int, Sequence]], vocab_size: int, device: torch.device) -> Cuts:
    seqs = [seq for _, seq in cut]
    asked = (seq.params.top_k for seq in seqs)
    top_k = [min(k, vocab_size) if k > 0 else vocab_size for k in asked]
    return Cuts(
        rows=upload(np.array([row for row, _ in cut]), device),
        temperatures=upload(_temperatures(seqs)[:, None], device),
        min_p=_column((seq.params.min_p for seq in seqs), device),
        top_k=upload(np.array(top_k)[:, None], device),
        top_p=_column((seq.params.top_p for seq in seqs), device),
        largest_k=max((k for k in top_k if k < vocab_size), default=0),
    )


def _column(values: Iterable[float], device: torch.device) -> torch.Tensor:
    array: Array = np.fromiter(values, np.float32)
    return upload(array[:, None], device)
