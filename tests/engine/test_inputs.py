"""What a decode step takes over from the batch before it: the block tables."""

from conftest import ctrl_c_before
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.engine.inputs import ROOM, BlockTables
from nanovllm.engine.sequence import Sequence


def make_seq(blocks: list[int]) -> Sequence:
    seq = Sequence([0], SamplingParams())
    seq.block_table = blocks
    return seq


def assert_right(tables: BlockTables, seqs: list[Sequence]) -> None:
    found = tables.of(seqs)
    assert found.shape == (len(seqs), max(len(seq.block_table) for seq in seqs))
    for row, seq in zip(found.tolist(), seqs, strict=True):
        length = len(seq.block_table)
        assert row[:length] == seq.block_table and not any(row[length:])


CHANGES = ["nothing", "grow", "begin anew", "alike", "leave", "come", "turn round"]


@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 5)), max_size=30))
def test_tables_are_those_of_the_batch_before(changes: list[tuple[str, int]]) -> None:
    seqs, tables, block = [make_seq([1]), make_seq([2, 3])], BlockTables(), 3
    for change, number in changes:
        block += 1
        seq = seqs[number % len(seqs)]
        match change:
            case "grow":
                seq.block_table += range(block, block + 1 + number * ROOM // 4)
            case "begin anew":  # with a table of the same length
                seq.block_table = [block + n for n in range(len(seq.block_table))]
            case "alike":
                seq.block_table = list(seq.block_table)
            case "leave" if len(seqs) > 1:
                seqs.remove(seq)
            case "come":
                seqs.insert(number % len(seqs), make_seq([block] * (1 + number)))
            case "turn round":
                seqs.reverse()
        assert_right(tables, seqs)


def test_tables_of_a_step_are_overwritten() -> None:
    """Its arrays may be read while the next step's are made."""
    seq, tables = make_seq([1, 2]), BlockTables()
    first = tables.of([seq])
    seq.block_table.append(3)
    tables.of([seq])
    assert first.tolist() == [[1, 2]]


def test_row_is_lost_by_ctrl_c() -> None:
    """Of tables of which one has outgrown the matrix, and two of one length change places."""
    code, struck = BlockTables.of.__code__, 0
    for _, _, line in code.co_lines():
        seqs, tables = [make_seq([1]), make_seq([2, 3]), make_seq([4, 5])], BlockTables()
        tables.of(seqs)
        seqs[0].block_table += range(6, 6 + 2 * ROOM)
        seqs[1:] = seqs[:0:-1]
        done = False
        with ctrl_c_before(line, code):
            tables.of(seqs)
            done = True
        struck += not done
        found = tables.of(seqs)
        assert found[1:, :2].tolist() == [[4, 5], [2, 3]], f"line {line}"
        assert found[0].tolist() == seqs[0].block_table, f"line {line}"
    assert struck > 10
