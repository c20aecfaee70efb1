"""What the guesser writes into a device table equals what the head's definition guesses."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_model
from heads import Definition, make_head, residuals

from nanovllm.config import Config
from nanovllm.drafting.eagle3_config import HeadConfig
from nanovllm.drafting.eagle3_files import load_head
from nanovllm.drafting.head_guesser import HeadGuesser
from nanovllm.engine.run.device_table import NO_CHANGES, DeviceTable, TableLayout
from nanovllm.engine.run.step_inputs import PrefillInputs, StepInputs
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.start.placement import resolve_placement
from nanovllm.kernels.plain.noise import noise_keys
from nanovllm.kernels.plain.sample import sample
from nanovllm.layers.context import Context
from nanovllm.layers.embed_head import VocabParallelEmbedding
from nanovllm.layers.ranks import ALONE
from nanovllm.models.config import ModelConfig

pytestmark = pytest.mark.usefixtures("one_thread")

BLOCK, WIDTH, MOST = 16, 5, 4
TAPS = (2, 3, 4)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def head_dir(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_head(tmp_path_factory.mktemp("head"), target)


class Engine:
    """A guesser, a table, and sequences by table row, with blocks in any order."""

    def __init__(self, target: Path, head_dir: Path, backend: str) -> None:
        self.target, self.definition = target, Definition(head_dir, target)
        config = HeadConfig.from_dir(head_dir)
        options: Any = dict(
            device="cpu", dtype="float32", kvcache_block_size=BLOCK, attention_backend=backend,
            speculative_config=dict(method="eagle3", model="m", num_speculative_tokens=MOST),
        )  # fmt: skip
        placement = resolve_placement(Config("m", **options), config.layer, ALONE)
        model = ModelConfig.from_dir(target)
        embedding = VocabParallelEmbedding(model.vocab_size, model.hidden_size)
        embedding.weight.data.copy_(self.definition.weights["embed_tokens.weight"])
        head = load_head(head_dir, config, 128)
        head.bind(placement.backend)
        self.guesser = HeadGuesser(head, embedding, placement)
        self.table = DeviceTable(TableLayout(6, WIDTH, BLOCK, MOST), torch.device("cpu"))
        self.state = self.table.columns
        self.guesser.make_rows(self.table.layout.num_rows)
        self.guesser.pool.allocate(40)
        self.blocks = random.Random(3).sample(range(40), 6 * WIDTH)
        self.tokens: dict[int, list[int]] = {}

    def add(self, row: int, tokens: list[int], chunks: list[int]) -> None:
        """Compute a prompt in chunks, and let the model answer with its last token."""
        state = self.state
        self.tokens[row] = tokens
        own = self.blocks[row * WIDTH : (row + 1) * WIDTH]
        state.block_tables[row] = torch.tensor(own, dtype=torch.int32)
        ends = [*chunks, len(tokens) - 1]
        for start, end in zip([0, *ends], ends, strict=False):
            self.prefill([(row, start, end)])
        self.tell(row)

    def tell(self, row: int) -> None:
        """The table has the sequence's last token and its length."""
        self.state.tokens[row] = self.tokens[row][-1]
        self.state.lengths[row] = len(self.tokens[row]) - 1
        self.state.seeds[row], self.state.temperatures[row] = row, 0.0
        self.state.drafts.limits[row] = WIDTH * BLOCK

    def prefill(self, parts: list[tuple[int, int, int]]) -> None:
        """Compute tokens [start, end) of each row's sequence; the token after those may follow."""
        ids, positions, slots, follow, sampled = [], [], [], [], []
        q_ends, k_ends, taps = [0], [0], []
        for row, start, end in parts:
            tokens = self.tokens[row]
            places = torch.arange(start, end)
            ids += tokens[start:end]
            positions.append(places)
            slots.append(self.state.block_tables[row][places // BLOCK] * BLOCK + places % BLOCK)
            is_last = end == len(tokens) - 1
            follow.append(0 if is_last else tokens[end])
            q_ends.append(len(ids))
            k_ends.append(k_ends[-1] + end)
            taps.append([x[start:end] for x in residuals(self.target, tokens[:end], TAPS)])
            if is_last:
                sampled.append((len(ids) - 1, row))
        rows = torch.tensor([row for row, _, _ in parts])
        context = Context(
            True, torch.cat(slots).long(), torch.tensor(q_ends).int(), torch.tensor(k_ends).int(),
            max_seqlen_q=max(end - start for _, start, end in parts), max_seqlen_k=80,
            block_tables=self.state.block_tables[rows] if any(p[1] for p in parts) else None,
        )  # fmt: skip
        places, samples = (np.array([x[i] for x in sampled], np.int64) for i in (0, 1))
        nothing = np.zeros(0)
        prefill = PrefillInputs(
            *[nothing] * 5, table_rows=rows.numpy(), sample_table_rows=samples,
            sampled_tokens=places,
        )  # fmt: skip
        arrays = {"next_tokens": np.array(follow)}
        inputs = StepInputs(len(rows), 0, NO_CHANGES, prefill, arrays=arrays)
        tapped = [torch.cat(parts) for parts in zip(*taps, strict=True)]
        tokens = torch.tensor(ids), torch.cat(positions)
        self.guesser.prefill(self.state, inputs, *tokens, context, tapped)

    def expected(self, row: int, number: int) -> list[int]:
        tokens = self.tokens[row]
        tapped = residuals(self.target, tokens[:-1], TAPS)
        return self.definition.drafts(tokens, tapped, number)

    def batch(self, rows: list[int], queries: int, pad: int = 0) -> Size:
        unused = self.table.layout.unused_row
        self.state.batch[: len(rows) + pad] = torch.tensor(rows + [unused] * pad).int()
        return Size(len(rows) + pad, queries)

    def step(self, rows: list[int], queries: int, accepted: list[int], pad: int = 0) -> list[Any]:
        """A step in which so many drafts are right. Returns the drafts."""
        state, size = self.state, self.batch(rows, queries, pad)
        self.guesser.guess(state, size)
        drafts = [state.drafts.tokens[row, : queries - 1].tolist() for row in rows]
        taps = []
        for row, own, right in zip(rows, drafts, accepted, strict=True):
            known = len(self.tokens[row]) - 1
            both = self.tokens[row] + [max(token, 0) for token in own]
            taps.append([x[known:] for x in residuals(self.target, both, TAPS)])
            drawn = [*own[:right], 7 * len(both) % 251]
            self.tokens[row] += drawn
            state.drafts.recent[row, : len(drawn)] = torch.tensor(drawn, dtype=torch.int32)
            self.tell(row)
        tapped = [torch.cat([*x, torch.zeros(pad * queries, 64)]) for x in zip(*taps, strict=True)]
        self.guesser.keep(state, size, tapped)
        return drafts


@pytest.fixture(params=["torch", "cpu"])
def engine(request: Any, target: Path, head_dir: Path) -> Engine:
    if request.param == "cpu":
        request.getfixturevalue("compiler")
    with torch.inference_mode():
        return Engine(target, head_dir, request.param)


def ids(seed: int, number: int) -> list[int]:
    return random.Random(seed).choices(range(259), k=number)


@torch.inference_mode()
def test_drafts_are_those_of_the_definition(engine: Engine) -> None:
    """After any number of accepted drafts, in steps of any size, in batches of any order."""
    engine.add(0, ids(0, 20), chunks=[])
    engine.add(3, ids(1, 2), chunks=[])
    engine.add(1, ids(2, 40), chunks=[7, 16, 33])
    steps = [
        ([0, 3, 1], 5, [0, 4, 2]), ([1, 0, 3], 5, [4, 0, 1]), ([3, 1], 3, [2, 0]),
        ([0, 1, 3], 1, [0, 0, 0]), ([1], 2, [1]), ([0, 1, 3], 5, [1, 1, 3]), ([3, 0], 5, [0, 2]),
    ]  # fmt: skip
    seen = set()
    for number, (rows, queries, accepted) in enumerate(steps):
        expected = [engine.expected(row, queries - 1) if queries > 1 else [] for row in rows]
        assert engine.step(rows, queries, accepted, pad=number % 2) == expected
        seen |= {token for drafts in expected for token in drafts}
    assert len(seen) > 8


@torch.inference_mode()
def test_a_sequence_decoded_among_prompts_keeps_its_keys(engine: Engine) -> None:
    engine.add(0, ids(0, 20), chunks=[])
    engine.step([0], 5, [3])
    engine.tokens[0] += [9]  # the model's answer to the last token, in a step with a prompt
    engine.tokens[2] = ids(4, 18)
    length = len(engine.tokens[0])
    state = engine.state
    state.block_tables[2] = torch.tensor(engine.blocks[10:15], dtype=torch.int32)
    engine.prefill([(0, length - 2, length - 1), (2, 0, 17)])
    engine.tell(0)
    engine.tell(2)
    expected = [engine.expected(row, 4) for row in (0, 2)]
    assert engine.step([0, 2], 5, [0, 0]) == expected


@torch.inference_mode()
def test_a_draft_is_drawn_with_the_key_of_its_position(engine: Engine) -> None:
    """A head that says what the model says then agrees with it at any temperature."""
    engine.add(1, ids(2, 20), chunks=[])
    engine.state.temperatures[1], engine.state.seeds[1] = 50.0, 77
    seen: list[torch.Tensor] = []
    compute = engine.guesser.head.compute_logits
    engine.guesser.head.compute_logits = lambda x: seen.append(compute(x)) or seen[-1]  # type: ignore[method-assign]
    (drafts,) = engine.step([1], 5, [0])
    keys = noise_keys(torch.tensor([77] * 4), torch.arange(20, 24))
    logits = torch.cat(seen)
    assert drafts == sample(logits, torch.full((4,), 50.0), keys).tolist()
    assert drafts != logits.argmax(-1).tolist()


@torch.inference_mode()
def test_no_keys_are_stored_behind_the_table(engine: Engine) -> None:
    """The last drafts of the longest sequence have no block."""
    engine.add(0, ids(0, WIDTH * BLOCK - 1), chunks=[])
    before = engine.guesser.pool.cache.clone()
    own = engine.blocks[:WIDTH]
    engine.state.drafts.limits[0] = WIDTH * BLOCK
    engine.step([0], 5, [0])
    changed = (engine.guesser.pool.cache != before).any(-1).any(0)
    assert set(changed.nonzero().flatten().tolist()) <= set(own)
