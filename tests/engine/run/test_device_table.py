"""The device's rows equal the sequences at every decode step, after any history."""

import random

import numpy as np
import pytest
import torch
from conftest import ctrl_c_before

from nanovllm import SamplingParams
from nanovllm.drafting.table_drafting import expect
from nanovllm.drafting.table_rows import TableRows
from nanovllm.engine.run.device_table import DeviceTable, TableLayout
from nanovllm.engine.run.draw_inputs import noise_key
from nanovllm.engine.run.ledger import Ledger
from nanovllm.engine.run.step_inputs import StepInputs, step_inputs
from nanovllm.engine.schedule.batch import Batch
from nanovllm.engine.schedule.sequence import PENDING, Sequence, SequenceStatus
from nanovllm.kernels.plain.read_groups import read_groups
from nanovllm.kernels.plain.read_table import Decoding, TableState
from nanovllm.kernels.table import PLAIN

BLOCK_SIZE, MAX_BLOCKS, MOST = 4, 8, 5
CPU = torch.device("cpu")


class Engine:
    """What an engine does with rows, without a model: a token is the number of its step."""

    def __init__(self, parts: tuple[int, ...] = (1,)) -> None:
        self.parts = parts  # of each cache group
        layout = TableLayout(MOST, MAX_BLOCKS, BLOCK_SIZE, block_parts=parts)
        self.table, self.ledger = DeviceTable(layout, CPU), Ledger(layout)
        self.seqs: list[Sequence] = []
        self.next_block = 0
        self.step = 1000
        self.num_changes = 0

    def come(self, length: int) -> None:
        """A sequence begins to run."""
        params = SamplingParams(temperature=length / 7, seed=length, max_tokens=100)
        seq = Sequence(list(range(length)), params)
        self.seqs.append(seq)
        self.run(seq)

    def run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        seq.release_cache()
        seq.block_tables = [[] for _ in self.parts]
        self.grow(seq)

    def grow(self, seq: Sequence, more: int = 0) -> None:
        for table in seq.block_tables:
            while len(table) * BLOCK_SIZE < seq.num_tokens + more:
                self.next_block += 1
                table.append(self.next_block % 1000)
        seq.room = len(seq.block_table) * BLOCK_SIZE

    def slots(self, seq: Sequence, place: int) -> list[int]:
        """Where the token at a place is stored in each group."""
        return [
            table[place // BLOCK_SIZE] * part * BLOCK_SIZE + place % BLOCK_SIZE
            for table, part in zip(seq.block_tables, self.parts, strict=True)
        ]

    def tables(self, seq: Sequence) -> list[list[int]]:
        """What the device reads of its blocks in each group."""
        tables = zip(seq.block_tables, self.parts, strict=True)
        return [[block * part for block in table] for table, part in tables]

    def prefill(self, seqs: list[Sequence], size: int, num_decodes: int = 0) -> None:
        """Compute `size` tokens of each of these, or as many as are left."""
        for seq in seqs:
            seq.num_scheduled_tokens = min(size, seq.num_uncached_tokens)
        batch = Batch(seqs, is_prefill=True, num_decodes=num_decodes)
        inputs = step_inputs(batch, BLOCK_SIZE, self.ledger, [])
        assert inputs.prefill is not None
        places, rows = inputs.prefill.pending()
        given = [token for seq in seqs for token in scheduled(seq)]
        self.write(inputs)
        filled = self.table.fill_pending(
            *map(torch.from_numpy, (inputs.prefill.input_ids, places, rows))
        )
        assert filled.tolist() == given
        if inputs.width:
            tables = self.table.block_tables[:, inputs.prefill.table_rows, : inputs.width]
            for index, seq in enumerate(seqs):
                found = tables[:, index, : len(seq.block_table)]
                assert found.tolist() == self.tables(seq)
        self.leave_tokens(batch, torch.from_numpy(inputs.prefill.sample_table_rows))

    def verify(self, seqs: list[Sequence], size: int, rng: random.Random) -> None:
        """Up to `size` drafts for some of the sequences, of which some are right."""
        for seq in self.seqs:
            self.read(seq)
        drafts = {}
        for seq in rng.sample(seqs, rng.randint(1, len(seqs))):
            room = min(size, BLOCK_SIZE * MAX_BLOCKS - seq.num_tokens - 1)
            drafts[seq] = [-7 - index for index in range(rng.randint(1, max(1, room)))]
            self.grow(seq, len(drafts[seq]))
        for seq in seqs:
            self.grow(seq)
            seq.num_scheduled_tokens = 1
        batch = Batch(seqs, is_prefill=True, num_decodes=len(seqs), drafts=drafts)
        inputs = step_inputs(batch, BLOCK_SIZE, self.ledger, [])
        prefill = inputs.prefill
        assert prefill is not None and not len(prefill.pending()[0])
        tokens = [[seq.token_ids[-1], *drafts.get(seq, ())] for seq in seqs]
        places = [
            (seq, seq.num_tokens - 1 + i)
            for seq, t in zip(seqs, tokens, strict=True)
            for i in range(len(t))
        ]
        assert prefill.input_ids.tolist() == [token for each in tokens for token in each]
        assert prefill.positions.tolist() == [place for _, place in places]
        slots = np.array([self.slots(seq, place) for seq, place in places])
        assert prefill.slot_mapping.tolist() == slots.T.flatten().tolist()
        assert prefill.sampled_tokens.tolist() == list(range(len(places)))
        assert [
            (s, s.num_tokens - 1 + o)
            for s, o in zip(batch.sampling_seqs, batch.offsets, strict=True)
        ] == places
        assert np.diff(prefill.cu_seqlens_q).tolist() == [len(each) for each in tokens]
        assert np.diff(prefill.cu_seqlens_k).tolist() == [
            seq.num_cached_tokens + len(each) for seq, each in zip(seqs, tokens, strict=True)
        ]
        self.write(inputs)
        drawn = torch.arange(self.step, self.step + len(places))
        self.step += len(places)
        self.table.keep_tokens(torch.from_numpy(prefill.sample_table_rows), drawn)
        for seq in seqs:
            first = batch.sampling_seqs.index(seq)
            number = 1 + rng.randint(0, len(drafts.get(seq, ())))
            seq.token_ids += drawn[first : first + number].tolist()
            seq.num_cached_tokens = seq.num_tokens - 1
            if rng.random() < 0.5:  # blocks that only wrong drafts needed
                num_blocks = -(-seq.num_cached_tokens // BLOCK_SIZE)
                seq.block_tables = [table[:num_blocks] for table in seq.block_tables]
                seq.room = num_blocks * BLOCK_SIZE

    def decode(self, seqs: list[Sequence], padding: int) -> None:
        for seq in seqs:
            seq.num_scheduled_tokens = 1
            self.grow(seq)
        batch = Batch(seqs, is_prefill=False)
        inputs = step_inputs(batch, BLOCK_SIZE, self.ledger, [])
        assert inputs.width == max(len(seq.block_table) for seq in seqs)
        self.write(inputs)
        size = len(seqs) + padding
        decoding = PLAIN.read_table(self.table.columns, size, inputs.width, BLOCK_SIZE)
        self.assert_right(decoding, seqs)
        self.leave_tokens(batch, decoding.rows[: len(seqs)])

    def write(self, inputs: StepInputs) -> None:
        places, words = inputs.changes
        self.num_changes = len(places)
        assert len(set(places.tolist())) == len(places) == len(words)
        self.table.write(inputs.changes)

    def leave_tokens(self, batch: Batch, rows: torch.Tensor) -> None:
        """Each gets the number of the step; only the device has it before the next step."""
        for seq in self.seqs:
            self.read(seq)
        self.step += 1
        sampling = batch.sampling_seqs
        self.table.keep_tokens(rows, torch.full((len(sampling),), self.step))
        for seq in batch.seqs:
            seq.num_cached_tokens += seq.num_scheduled_tokens
        for seq in sampling:
            seq.token_ids.append(PENDING)
            seq.num_pending_tokens = 1
            known_tokens[seq] = self.step

    def read(self, seq: Sequence) -> None:
        """The host reads its token, if one is in flight."""
        if seq.num_pending_tokens:
            seq.token_ids[-1] = known_tokens.pop(seq)
            seq.num_pending_tokens = 0

    def assert_right(self, decoding: Decoding, seqs: list[Sequence]) -> None:
        size = len(seqs)
        where = [seq.num_cached_tokens for seq in seqs]
        slots = [self.slots(seq, position) for seq, position in zip(seqs, where, strict=True)]
        assert len(set(decoding.rows[:size].tolist())) == size
        assert decoding.input_ids[:size].tolist() == [last_token(seq) for seq in seqs]
        assert decoding.positions[:size].tolist() == where
        more = read_groups(
            self.table.columns, self.table.block_tables[1:], decoding, BLOCK_SIZE
        )  # of the other groups
        found = torch.cat([decoding.slot_mapping[None], more[0]])
        assert found[:, :size].T.tolist() == slots and (found[:, size:] == -1).all()
        assert decoding.context_lens[:size].tolist() == [position + 1 for position in where]
        assert decoding.keys[:size].tolist() == [noise_key(seq) for seq in seqs]
        temperatures = np.array([seq.temperature for seq in seqs], np.float32)
        assert decoding.temperatures[:size].tolist() == temperatures.tolist()
        tables = torch.cat([decoding.block_tables[None], more[1]])
        for index, seq in enumerate(seqs):
            assert tables[:, index, : len(seq.block_table)].tolist() == self.tables(seq)
        assert not decoding.context_lens[size:].any() and not decoding.input_ids[size:].any()
        assert not decoding.temperatures[size:].any()


known_tokens: dict[Sequence, int] = {}  # those in flight


def last_token(seq: Sequence) -> int:
    return known_tokens[seq] if seq.num_pending_tokens else seq.token_ids[-1]


def scheduled(seq: Sequence) -> list[int]:
    tokens = [*seq.token_ids[:-1], last_token(seq)]
    return tokens[seq.num_cached_tokens : seq.num_cached_tokens + seq.num_scheduled_tokens]


DOINGS = {
    "come": 6, "decode": 12, "chunk": 8, "mixed": 2, "verify": 4, "leave": 4, "preempt": 2,
    "error": 1,
}  # fmt: skip


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_the_sequences(seed: int) -> None:
    """Tokens arrive a step late; sequences come, end, are preempted, have chunks; steps fail."""
    rng = random.Random(seed)
    engine = Engine(rng.choice([(1,), (1, 1), (1, 2, 1)]))
    known_tokens.clear()
    done: set[str] = set()
    for doing in rng.choices([*DOINGS], [*DOINGS.values()], k=500):
        for long in [seq for seq in engine.seqs if seq.num_tokens >= BLOCK_SIZE * MAX_BLOCKS - 1]:
            engine.seqs.remove(long)
            long.finish("length")
        seqs, size = engine.seqs, rng.randint(1, 10)
        seq = rng.choice(seqs) if seqs else None
        decodes = [s for s in seqs if s.num_uncached_tokens == 1]
        prefills = [s for s in seqs if s.num_uncached_tokens > 1]
        some = rng.sample(decodes, rng.randint(1, len(decodes))) if decodes else []
        match doing:
            case "come" if len(seqs) < MOST:
                engine.come(size)
            case "decode" if decodes:
                engine.decode(some, padding=size % 3)
            case "chunk" if prefills:
                engine.prefill(prefills, size)
            case "mixed" if decodes:
                for each in decodes:
                    engine.grow(each)
                engine.prefill([*decodes, *prefills], size, num_decodes=len(decodes))
            case "verify" if decodes:
                engine.verify(some, size, rng)
            case "leave" if seq is not None:
                seqs.remove(seq)
                seq.finish("length")
            case "preempt" if seq is not None:
                engine.read(seq)
                engine.run(seq)
            case "error" if decodes:
                inputs = step_inputs(Batch(some, is_prefill=False), BLOCK_SIZE, engine.ledger, [])
                if size % 3:  # before the changes were written, or after, or after they computed
                    engine.write(inputs)
                if size % 3 > 1:
                    PLAIN.read_table(engine.table.columns, len(some), MAX_BLOCKS, BLOCK_SIZE)
                engine.ledger.reset()
                for each in seqs:
                    each.drop_pending()
                    engine.run(each)
            case _:
                continue
        done.add(doing)
    assert done == DOINGS.keys()


def test_a_decode_step_writes_only_new_blocks() -> None:
    engine = Engine()
    known_tokens.clear()
    for length in (3, 9, 6):
        engine.come(length)
    engine.prefill(engine.seqs, 100)
    changes = []
    for _ in range(10):
        engine.decode(engine.seqs, padding=1)
        changes.append(engine.num_changes)
    assert changes[0] >= 3, "where they stand"
    tokens = np.array([[4, 10, 7]]) + np.arange(1, 10)[:, None]  # of each in the next steps
    assert changes[1:] == (tokens % BLOCK_SIZE == 1).sum(axis=1).tolist(), "new blocks, and no more"


def test_rows_of_ended_sequences_are_used_again() -> None:
    """There is one row for each running sequence; the others keep theirs."""
    engine = Engine()
    known_tokens.clear()
    for number in range(30):
        while len(engine.seqs) < MOST:
            engine.come(4 + number % 7)
        engine.prefill([seq for seq in engine.seqs if not seq.num_cached_tokens], 100)
        engine.decode(engine.seqs, padding=1)
        assert number == 0 or engine.num_changes <= 12, "rows that stayed were written again"
        for seq in engine.seqs[: 1 + (number + 1) % 3]:
            engine.seqs.remove(seq)
            seq.finish("length")


@pytest.mark.parametrize(
    "name", ["decode", "_change_blocks", "_rows_of", "_take_row", "_take_changes"]
)
def test_rows_are_right_after_ctrl_c(name: str) -> None:
    """Ctrl-C before any line, while a sequence comes and tables grow: all sequences restart."""
    code, struck = getattr(Ledger, name).__code__, 0
    for line in sorted({line for _, _, line in code.co_lines() if line is not None}):
        engine = Engine()
        known_tokens.clear()
        for length in (4, 8):
            engine.come(length)
        engine.prefill(engine.seqs, 100)
        engine.come(3)
        for seq in engine.seqs:
            engine.grow(seq)
        done = False
        with ctrl_c_before(line, code):
            engine.ledger.decode(engine.seqs)
            done = True
        struck += not done
        engine.ledger.reset()
        for seq in engine.seqs:
            seq.drop_pending()
            engine.run(seq)
        engine.prefill(engine.seqs, 2)
        engine.prefill([seq for seq in engine.seqs if seq.num_uncached_tokens > 1], 100)
        engine.decode([seq for seq in engine.seqs if seq.num_uncached_tokens == 1], padding=1)
    assert struck >= 4


def test_a_row_has_no_token_of_its_earlier_owner() -> None:
    """A prompt whose last token is decoded gets the row of a sequence of the same length."""
    engine = Engine()
    known_tokens.clear()
    for _ in range(engine.ledger.layout.num_rows - 1):
        engine.come(3)
        engine.prefill(engine.seqs, 100)
        engine.seqs.pop().finish("length")
    engine.table.columns.tokens.fill_(PENDING)  # no step may read it as a token
    engine.come(4)
    engine.prefill(engine.seqs, 3)
    engine.decode(engine.seqs, padding=0)


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 0.7, 1e37, 1e300])
@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_keys_and_temperatures_fit_into_words(temperature: float, seed: int) -> None:
    seq = Sequence([1], SamplingParams(temperature=temperature, seed=seed), index=int(seed > 1))
    seq.block_tables, seq.num_scheduled_tokens = [[0]], 1
    layout = TableLayout(1, 1, BLOCK_SIZE)
    table, ledger = DeviceTable(layout, CPU), Ledger(layout)
    inputs = step_inputs(Batch([seq], is_prefill=False), BLOCK_SIZE, ledger, [])
    table.write(inputs.changes)
    decoding = PLAIN.read_table(table.columns, 1, 1, BLOCK_SIZE)
    assert decoding.keys.tolist() == [noise_key(seq)]
    assert 0 < decoding.temperatures.item() < float("inf")
    assert decoding.input_ids.tolist() == [1]


def drafting_engine(most: int = 3) -> Engine:
    """An engine whose table has room for drafts, with two sequences that decode."""
    engine = Engine()
    known_tokens.clear()
    layout = TableLayout(MOST, MAX_BLOCKS, BLOCK_SIZE, most, BLOCK_SIZE * MAX_BLOCKS)
    engine.table, engine.ledger = DeviceTable(layout, CPU), Ledger(layout, TableRows(layout))
    for length in (5, 9):
        engine.come(length)
    engine.prefill(engine.seqs, 100)
    return engine


def guess(engine: Engine, accepted: list[int]) -> TableState:
    """A step with three drafts each, of which so many are right; returns what it found."""
    seqs = engine.seqs
    for seq in seqs:
        engine.grow(seq)
        seq.num_scheduled_tokens = 1
    batch = Batch(seqs, is_prefill=False, num_drafts=3)
    inputs = step_inputs(batch, BLOCK_SIZE, engine.ledger, [])
    engine.write(inputs)
    state = engine.table.columns
    found = TableState(*(column.clone() for column in state[:-1]), state.drafts)
    rows = state.batch[: len(seqs)].long()
    for row, seq, number in zip(rows.tolist(), seqs, accepted, strict=True):
        state.lengths[row] += 1 + number
        state.tokens[row] = engine.step
        seq.token_ids += [PENDING]
        seq.num_pending_tokens, seq.num_possible_tokens = 1, 3
        seq.num_cached_tokens += 1
    return found


def take(engine: Engine, accepted: list[int]) -> None:
    """The host learns what was accepted."""
    for seq, number in zip(engine.seqs, accepted, strict=True):
        expect(seq, 1 + number, 3)
        seq.token_ids[-1 - number :] = [engine.step] * (1 + number)
        seq.num_pending_tokens = 0
        engine.grow(seq)


def test_a_row_that_is_ahead_is_left_alone() -> None:
    """After drafts only the device knows lengths and tokens: they are not sent."""
    engine = drafting_engine()
    for seq in engine.seqs:
        engine.read(seq)
    guess(engine, [2, 0])
    found = guess(engine, [0, 1])  # before the host knows of the first two
    assert engine.num_changes == 0
    rows = found.batch[:2].tolist()
    assert found.lengths[rows].tolist() == [5 + 3, 9 + 1]


def test_a_step_without_drafts_goes_on_from_those_that_were_accepted() -> None:
    engine = drafting_engine()
    for seq in engine.seqs:
        engine.read(seq)
    guess(engine, [2, 0])
    take(engine, [2, 0])
    engine.decode(engine.seqs, padding=1)  # asserts that lengths and tokens are right
    assert engine.num_changes <= 6, "a block and a limit, and no lengths"


def test_what_a_row_was_sent_for_drafts() -> None:
    """Its history without the last token, and where blocks end."""
    engine = drafting_engine()
    for seq in engine.seqs:
        engine.read(seq)
    guess(engine, [0, 0])
    drafts, rows = engine.table.columns.drafts, engine.table.columns.batch[:2].tolist()
    for row, seq in zip(rows, engine.seqs, strict=True):
        end = seq.num_tokens - 2
        assert drafts.history[row, :end].tolist() == seq.token_ids[:end]
        assert drafts.limits[row] == len(seq.block_table) * BLOCK_SIZE
    assert drafts.counts[rows].tolist() == [1, 1]


def test_a_preempted_row_that_was_ahead_is_written_again() -> None:
    engine = drafting_engine()
    for seq in engine.seqs:
        engine.read(seq)
    guess(engine, [1, 1])
    take(engine, [1, 1])
    for seq in engine.seqs:
        engine.run(seq)
    engine.prefill(engine.seqs, 100)
    engine.decode(engine.seqs, padding=0)


def test_a_row_has_nothing_of_its_earlier_owners_drafts() -> None:
    """A row that is ahead goes to a sequence whose prompt is cached up to its last token."""
    engine = drafting_engine()
    for number in range(2 * MOST):
        for seq in engine.seqs:
            engine.read(seq)
        found = guess(engine, [0] * len(engine.seqs))
        assert_rows_were_sent(engine, found)
        for seq in engine.seqs:
            seq.finish("length")
        engine.seqs.clear()
        engine.come(7)
        engine.seqs[0].token_ids[:] = range(10 * number, 10 * number + 7)
        engine.seqs[0].num_cached_tokens = 6


def assert_rows_were_sent(engine: Engine, found: TableState) -> None:
    """The lengths, last tokens and histories of all sequences, as they were before a step."""
    drafts = engine.table.columns.drafts
    for row, seq in zip(found.batch.tolist(), engine.seqs, strict=False):
        end = seq.num_tokens - 2  # without the last known token, and the one in flight
        assert found.lengths[row] == seq.num_cached_tokens - 1
        assert found.tokens[row].flatten()[0] == seq.token_ids[end]
        assert drafts.history[row, :end].tolist() == seq.token_ids[:end]
