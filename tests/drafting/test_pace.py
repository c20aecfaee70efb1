"""How many drafts a sequence gets: what was right lately decides, and what a step costs."""

import random

import pytest
from drafts import RandomProposer

from nanovllm import SamplingParams
from nanovllm.drafting.costs import FREE_TOKENS, Candidate, GraphCosts, TokenCosts
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.pace import Outlook, Pace
from nanovllm.drafting.step_sizes import MOST_DRAFTS
from nanovllm.engine.cache.caches import CacheLayout, Caches
from nanovllm.engine.schedule.batch import Batch, Size
from nanovllm.engine.schedule.sequence import PENDING, Sequence

WORTH = 1 / (FREE_TOKENS + 1)  # with one sequence


def run(chance: float, num_tokens: int, worth: float = WORTH, limit: int = 4) -> tuple[int, int]:
    """Drafts and steps until there are so many tokens, if a draft is right with this chance."""
    rng, pace = random.Random(1), Pace()
    tokens = drafts = steps = 0
    while tokens < num_tokens:
        number = pace.most(tokens, worth, limit)
        accepted = 0
        while accepted < number and rng.random() < chance:
            accepted += 1
        if number:
            pace.learn(tokens, number, accepted)
        tokens += 1 + accepted
        drafts += number
        steps += 1
    return drafts, steps


def test_right_drafts_stay_as_many_as_allowed() -> None:
    drafts, steps = run(1.0, 1000)
    assert steps == 200 and drafts == 800


def test_wrong_drafts_become_rare() -> None:
    """Each costs a part of a step: together less than 2% of the steps."""
    drafts, steps = run(0.0, 1000)
    assert steps == 1000
    assert 0 < drafts * WORTH < 0.02 * steps


def test_a_right_draft_ends_the_pause() -> None:
    pace = Pace()
    pace.learn(10, 1, 0)
    assert not pace.is_due(12)
    pace.learn(12, 1, 1)
    assert pace.is_due(13)


def test_drafts_come_back_when_they_are_right_again() -> None:
    pace = Pace()
    for tokens in range(500):
        if number := pace.most(tokens, WORTH, 4):
            pace.learn(tokens, number, 0)
    tokens, steps = 500, 0
    while tokens < 1000:
        number = pace.most(tokens, WORTH, 4)
        if number:
            pace.learn(tokens, number, number)
        tokens += 1 + number
        steps += 1
    assert steps < 100 + 256 + 10


def outlook_after(num_accepted: int) -> Outlook:
    """Of an engine whose sequences had four drafts in each of 30 steps, so many of them right."""
    outlook = Outlook()
    for _ in range(30):
        Pace(outlook).learn(10, 4, num_accepted)
    return outlook


def test_a_new_sequence_starts_from_what_the_others_had() -> None:
    """Where no draft was right, it has one to try; where all were, as many as are allowed."""
    assert Pace(outlook_after(0)).most(10, WORTH, 4) == 1
    assert Pace(outlook_after(4)).most(10, 0.8, 4) == 4
    assert Pace().most(10, 0.8, 4) == 1


def test_its_own_drafts_soon_count_more() -> None:
    pace, other = Pace(outlook_after(0)), Pace(outlook_after(4))
    for tokens in range(0, 20, 5):
        pace.learn(tokens, 4, 4)
        other.learn(tokens, 4, 0)
    assert pace.chance > 0.8 and other.chance < 0.4


@pytest.mark.parametrize("chance", [0.1, 0.3, 0.5, 0.7, 0.9])
@pytest.mark.parametrize("num_seqs", [1, 8, 32, 128])
def test_drafts_pay_for_themselves(chance: float, num_seqs: int) -> None:
    """A step of B tokens takes FREE_TOKENS + B: none of these mixtures takes 2% longer for them."""
    worth = num_seqs / (FREE_TOKENS + num_seqs)
    drafts, steps = run(chance, 4000, worth)
    cost = steps * (FREE_TOKENS + num_seqs) + drafts * num_seqs
    assert cost < 1.02 * 4000 * (FREE_TOKENS + num_seqs)
    if chance >= 0.7 and num_seqs == 1:
        assert cost < 0.6 * 4000 * (FREE_TOKENS + num_seqs)


@pytest.mark.parametrize(("guess", "tries"), [(0.0, True), (0.6, True), (0.95, False)])
def test_a_costly_guess_is_tried_again_as_long_as_it_could_pay(guess: float, tries: bool) -> None:
    """Else an engine whose first drafts were wrong would never make one again."""
    pace = Pace(Outlook(0.01))
    costs = TokenCosts(guess)
    tried = [
        (number, length)
        for length in range(10, 400)
        for number in costs.worthwhile([Candidate(pace, length, 4)], 1, waits=False)
        if number and not pace.learn(length, number, 0)
    ]
    assert (2 <= len(tried) < 9) == tries and bool(tried) == tries


def make_seq(num_tokens: int = 5, **params: object) -> Sequence:
    params = {"max_tokens": 20, **params}
    seq = Sequence([1] * num_tokens, SamplingParams(**params))  # type: ignore[arg-type]
    seq.block_tables, seq.num_passed_blocks = [[]], [0]
    return seq


class Known(RandomProposer):
    """Always as many as asked for."""

    def guess(self, seq: Sequence, most: int) -> list[int]:
        return [1] * most


def numbers(
    drafting: HostDrafting, seqs: list[Sequence], num_tokens: int, budget: int, num_blocks: int = 99
) -> dict[Sequence, int]:
    """How many drafts each sequence gets, if there are so many free blocks of 4 tokens."""
    blocks = Caches(CacheLayout(), num_blocks, 4, 99, False)
    drafts = drafting.draft(seqs, num_tokens, budget, blocks)
    for seq, tokens in drafts.items():
        assert len(seq.block_table) == -(-(seq.num_tokens + len(tokens)) // 4)
    return {seq: len(tokens) for seq, tokens in drafts.items()}


def test_drafts_are_not_more_than_the_free_blocks_hold() -> None:
    drafting = HostDrafting(Known(0, 2), 4)
    seqs = [make_seq(), make_seq()]
    assert numbers(drafting, seqs, 2, 100, num_blocks=2) == {seqs[0]: 3}  # of 5 tokens


def test_a_sequence_gets_no_draft_that_could_not_count() -> None:
    """One more token always comes."""
    drafting = HostDrafting(Known(0, 2), 4)
    seqs = [make_seq() for _ in range(4)]
    for left, seq in enumerate(seqs):
        seq.token_ids += [1] * (19 - left)
    assert numbers(drafting, seqs, 4, 100) == {seqs[1]: 1, seqs[2]: 2, seqs[3]: 3}


def test_the_budget_is_kept() -> None:
    drafting = HostDrafting(Known(0, 2), 4)
    seqs = [make_seq() for _ in range(3)]
    assert [*numbers(drafting, seqs, 1, 6).values()] == [4, 2]
    assert numbers(drafting, seqs, 1, 0) == {}


def test_many_sequences_get_none() -> None:
    drafting = HostDrafting(Known(0, 2), 4)
    seqs = [make_seq() for _ in range(256)]
    assert numbers(drafting, seqs, 256, 10_000) == {}
    assert not drafting.wants(seqs) and drafting.wants(seqs[:1])


def test_sequences_that_cannot_have_drafts_are_not_asked() -> None:
    drafting = HostDrafting(Known(0, 2), 4)
    pending, reads = make_seq(), make_seq(presence_penalty=1.0)
    pending.token_ids.append(PENDING)
    pending.num_pending_tokens = 1
    assert numbers(drafting, [pending, reads], 2, 100) == {reads: 4}
    assert drafting.wants([reads])


def test_sequences_that_are_too_long_to_guess_have_fewer() -> None:
    seqs = [make_seq(5), make_seq(8), make_seq(30)]
    assert numbers(HostDrafting(Known(0, 2), 4, longest=8), seqs, 3, 100) == {seqs[0]: 3}


def test_padding_to_the_longest_drafts_is_bounded() -> None:
    """A step may compute as many queries for each sequence as one of them has."""
    drafting = HostDrafting(Known(0, 2), 64)
    seqs = [make_seq(max_tokens=200) for _ in range(60)]
    for seq in seqs[1:]:
        seq.parts.pace = Pace()
        seq.parts.pace._right, seq.parts.pace._weight, seq.parts.pace._next_try = 0.0, 9.0, 1000
    seqs[0].parts.pace = Pace()
    seqs[0].parts.pace._right = seqs[0].parts.pace._weight = 1e9
    assert numbers(drafting, seqs, 60, 10_000) == {seqs[0]: MOST_DRAFTS // 60}


def test_a_stop_that_was_guessed_is_no_wrong_draft() -> None:
    drafting = HostDrafting(Known(0, 2), 4)
    before = drafting._outlook.chance
    seq, blocks = make_seq(max_tokens=50), Caches(CacheLayout(), 99, 4, 99, False)
    blocks.grow(seq, 9)
    seq.num_cached_tokens = seq.num_tokens
    seq.token_ids += [1, 1, 1]
    seq.finish_reason = "stop"
    drafting.settle(Batch([seq], is_prefill=False, drafts={seq: [1, 1, 1, 1]}), blocks)
    assert drafting._outlook.chance > before


def test_drafts_are_counted_by_place() -> None:
    drafting, seq = HostDrafting(Known(0, 2), 4), make_seq()
    batch = Batch([seq], is_prefill=False, drafts={seq: [1] * 4})
    for num_accepted in (0, 2, 4):
        drafting.count(batch, seq, 4, num_accepted)
    assert (batch.num_drafted, batch.num_accepted) == (12, 6)
    assert (drafting.num_drafts, drafting.num_drafted) == (3, 12)
    assert drafting.accepted_at == [2, 2, 1, 1]


# With decode graphs


def graph_costs() -> GraphCosts:
    """1 ms a step, 1.2 ms with two drafts and 1.4 ms with four; twice as long for 32 sequences."""
    seconds = {1: 0.001, 3: 0.0012, 5: 0.0014}
    return GraphCosts(
        {Size(n, q): (1 + (n > 8)) * s for n in (1, 8, 32) for q, s in seconds.items()}
    )


def candidates(*chances: float, limit: int = 4, num_tokens: int = 9) -> list[Candidate]:
    found = []
    for chance in chances:
        pace = Pace(Outlook(chance))
        pace._next_try = 100
        found.append(Candidate(pace, num_tokens, limit))
    return found


@pytest.mark.parametrize(
    ("chances", "number"), [([0.9], 4), ([0.3], 2), ([0.1], 0), ([0.8] + [0.0] * 7, 0),
                            ([0.9] * 5 + [0.0] * 3, 4), ([0.9] * 40, 0)]
)  # fmt: skip
def test_all_sequences_have_the_drafts_that_give_most_tokens(
    chances: list[float], number: int
) -> None:
    """The chances of all together decide; where no graph is as large, none has any."""
    costs = graph_costs()
    numbers = costs.worthwhile(candidates(*chances), len(chances), waits=False)
    assert [*numbers] == [number] * len(chances)


def test_a_step_with_prompts_has_no_graph_for_drafts() -> None:
    assert [*graph_costs().worthwhile(candidates(0.9, 0.9), 7, waits=False)] == [0, 0]


def test_limits_of_sequences_bound_their_drafts() -> None:
    some = candidates(0.9, 0.9, 0.9)
    some[1] = some[1]._replace(limit=1)
    some[2] = some[2]._replace(limit=0)
    assert [*graph_costs().worthwhile(some, 3, waits=False)] == [4, 1, 0]


def test_a_quarter_that_is_due_lets_all_try() -> None:
    """In one step: another step is as long for each of them."""
    some = candidates(0.01, 0.01)
    assert [*graph_costs().worthwhile(some, 2, waits=False)] == [0, 0]
    late = [some[0], some[1]._replace(num_tokens=100)]
    assert [*graph_costs().worthwhile(late, 2, waits=False)] == [2, 2]
    assert [*graph_costs().worthwhile([*candidates(*[0.01] * 6), late[1]], 7, waits=False)] == [
        0
    ] * 7


@pytest.mark.parametrize("catch_up", [0.0, 0.003])
def test_tries_take_a_small_share_of_the_time(catch_up: float) -> None:
    """Where each sequence is due all the time; a draft model's tries take the time to catch up."""
    costs, total, lost = GraphCosts({Size(2, 1): 0.001, Size(2, 3): 0.0012}, catch_up), 0.0, 0.0
    late = [one._replace(num_tokens=100) for one in candidates(0.01, 0.01)]
    tries = 0
    for _ in range(5000):
        (number, _) = costs.worthwhile(late, 2, waits=False)
        total += 0.001
        lost += (0.0002 + catch_up) * (number > 0)
        tries += number > 0
    assert 0.018 < lost / total < 0.022 and tries > 25


def test_a_draft_model_catches_up_only_for_a_clear_gain() -> None:
    """What it has seen goes on for any gain. Two sequences have no graph for drafts here."""
    seconds = {Size(1, 1): 0.001, Size(1, 2): 0.0012}
    for chance, begins in ((0.22, False), (0.4, True)):
        for between in (candidates(0.0), candidates(1.0, 1.0)):
            costs = GraphCosts(seconds, catch_up=0.01)
            (going_on,) = costs.worthwhile(candidates(chance), 1, waits=False)
            assert going_on == 1
            costs.worthwhile(between, len(between), waits=False)
            (again,) = costs.worthwhile(candidates(chance), 1, waits=False)
            assert again == begins


@pytest.mark.parametrize("chance", [0.2, 0.5, 0.8, 1.0])
def test_the_gain_is_the_mean_of_right_drafts(chance: float) -> None:
    (candidate,) = candidates(chance)
    expected = [0, chance, chance + chance**2, chance + chance**2 + chance**3]
    assert candidate.pace.gains(3) == pytest.approx(expected)
    candidate.pace.learn(9, 4, 0)
    assert candidate.pace.gains(1)[1] < chance
