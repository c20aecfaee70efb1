"""Filters of logits, against hand-computed numbers and a slow, obvious twin in NumPy."""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SamplerInputs, sampler_inputs
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import examples

from nanovllm import SamplingParams
from nanovllm.engine.requests.bad_words import BadWords
from nanovllm.engine.run import narrowing
from nanovllm.engine.run.filters import listed
from nanovllm.engine.schedule.parts import SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.draw import cut
from nanovllm.layers.sampler import Sampler

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
EOS = 7
GAP = 1e-5  # in float32, a value closer to a border than this may be on either side


def make_seq(
    params: SamplingParams, prompt: list[int], output: list[int], bad_words: Any = ()
) -> Sequence:
    seq = Sequence(
        prompt,
        params,
        eos_token_ids=frozenset({EOS}),
        parts=SequenceParts(bad_words=BadWords(bad_words) if bad_words else None),
    )
    seq.token_ids += output
    return seq


def narrow_all(logits: torch.Tensor, inputs: SamplerInputs) -> None:
    """Apply all filters to the logits, in place."""
    for part in inputs.filters:
        some = logits[part.rows]
        part.narrow(some)
        if part.cuts is not None:
            assert inputs.temperatures is not None
            some = cut(some, inputs.temperatures[part.rows], part.cuts)
        logits[part.rows] = some


def narrowed(
    logits: list[float] | torch.Tensor, prompt: Any = (0,), output: Any = (), bad_words: Any = (),
    **params: Any,
) -> torch.Tensor:  # fmt: skip
    """One row's logits after the filters, as in the engine."""
    rows = torch.as_tensor(logits, dtype=torch.float32)[None].clone()
    seq = make_seq(SamplingParams(**params), list(prompt), list(output), bad_words)
    inputs = sampler_inputs([seq], rows.shape[1])
    assert inputs.filters, "nothing was narrowed"
    narrow_all(rows, inputs)
    return rows[0]


def left(logits: list[float] | torch.Tensor, **options: Any) -> list[int]:
    return torch.isfinite(narrowed(logits, **options)).nonzero()[:, 0].tolist()


def log(*probabilities: float) -> list[float]:
    return np.log(probabilities).tolist()


# By hand


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.9, 4), (0.3, 1), (0.41, 2), (0.69, 2), (0.71, 3), (0.96, 5), (1e-9, 1)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(top_p: float, kept: int) -> None:
    """.40 + .30 + .15 are .85, so 0.9 keeps a fourth token."""
    assert left(log(0.4, 0.3, 0.15, 0.1, 0.05), top_p=top_p) == list(range(kept))
    assert left(log(0.05, 0.1, 0.15, 0.3, 0.4), top_p=top_p) == list(range(5 - kept, 5))


@pytest.mark.parametrize("top_k", [1, 2, 3, 5, 6])
def test_top_k_keeps_exactly_k(top_k: int) -> None:
    """Of equal tokens, the first ones."""
    assert left([1.0, 3.0, 3.0, 2.0, 3.0, 0.0, 0.0], top_k=top_k) == sorted(
        [1, 2, 4, 3, 0, 5][:top_k]
    )


@pytest.mark.parametrize("top_k", [-1, 0, 5, 100])
def test_a_top_k_of_all_tokens_keeps_all(top_k: int) -> None:
    assert left([1.0, 3.0, 2.0, 0.0, 0.0], top_k=top_k, min_p=1e-9) == [0, 1, 2, 3, 4]


def test_min_p_is_a_share_of_the_best_probability() -> None:
    assert left(log(0.4, 0.3, 0.15, 0.1, 0.05), min_p=0.26) == [0, 1, 2]
    assert left(log(0.4, 0.3, 0.15, 0.1, 0.05), min_p=1.0) == [0]


def test_the_temperature_is_applied_before_the_cuts() -> None:
    """At 0.5 probabilities are squared: .4 and .3 then have .25 of .2825, 88%."""
    assert left(log(0.4, 0.3, 0.15, 0.1, 0.05), top_p=0.87, temperature=0.5) == [0, 1]
    assert left(log(0.4, 0.3, 0.15, 0.1, 0.05), top_p=0.87, temperature=1.0) == [0, 1, 2, 3]
    assert left(log(0.4, 0.2, 0.1), min_p=0.3, temperature=0.5) == [0]
    assert left(log(0.4, 0.2, 0.1), min_p=0.3, temperature=1.0) == [0, 1]


def test_top_p_is_a_share_of_what_top_k_keeps() -> None:
    """.4 is 57% of .4 + .3."""
    assert left(log(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5) == [0]
    assert left(log(0.4, 0.3, 0.2, 0.1), top_k=3, top_p=0.5) == [0, 1]


def test_repetition_penalty_lowers_logits_of_either_sign() -> None:
    """1.2 turns 2.5 into 2.0833 and -0.5 into -0.6, once for tokens of the prompt or the output."""
    out = narrowed(
        [2.5, -0.5, 2.5, 2.5], prompt=[0, 0, 1], output=[2, 2], repetition_penalty=1.2
    )  # fmt: skip
    torch.testing.assert_close(out, torch.tensor([2.5 / 1.2, -0.6, 2.5 / 1.2, 2.5]))
    assert out[0] == pytest.approx(2.0833, abs=1e-4)


def test_presence_and_frequency_penalties_count_the_output_only() -> None:
    out = narrowed(
        [1.0, 1.0, 1.0, 1.0], prompt=[0, 1], output=[1, 2, 2, 2], presence_penalty=0.5,
        frequency_penalty=0.25,
    )  # fmt: skip
    assert out.tolist() == [1.0, 0.25, -0.25, 1.0]


def test_the_order_of_bias_and_penalties() -> None:
    """First the bias, then the repetition penalty, then the other penalties."""
    out = narrowed(
        [1.0, 0.0], output=[0], repetition_penalty=2.0, presence_penalty=0.5,
        logit_bias={0: 3.0, 1: -1.0}, prompt=[1],
    )  # fmt: skip
    assert out.tolist() == [1.5, -2.0]


def test_a_bias_does_not_lift_a_forbidden_token() -> None:
    options: dict[str, Any] = dict(allowed_token_ids=[1, 2], logit_bias={0: 100.0, 1: 2.0})
    assert narrowed([0.0, 0.0, 5.0], **options).tolist() == [-torch.inf, 2.0, 5.0]


def test_stops_are_forbidden_before_min_tokens() -> None:
    params: dict[str, Any] = dict(min_tokens=2, stop_token_ids=[3])
    for output in ([], [1]):
        assert left([0.0] * 9, output=output, **params) == [0, 1, 2, 4, 5, 6, 8]
    seq = make_seq(SamplingParams(**params), [0], [1, 2])
    assert not seq.is_narrowed, "it is still narrowed, without need"
    assert not sampler_inputs([seq], 9).filters


def test_the_last_token_of_a_bad_word_is_forbidden() -> None:
    """A word of three tokens and one of one token."""
    words = [(1, 2, 3), (5,)]
    assert left([0.0] * 6, output=[4, 1, 2], bad_words=words) == [0, 1, 2, 4]


# Against the twin


def twin(logits: np.ndarray, seq: Sequence) -> tuple[np.ndarray, bool]:
    """Logits in float64 by definition, and whether some value is close to a border."""
    params, size = seq.params, len(logits)
    x = logits.astype(np.float64)
    if params.allowed_token_ids is not None:
        x[[i for i in range(size) if i not in params.allowed_token_ids]] = -np.inf
    for some in listed.forbidden_tokens(seq, []):
        x[sorted(some.ids)] = -np.inf
    for token_id, bias in (params.logit_bias or {}).items():
        x[token_id] += bias
    times = Counter(seq.output_token_ids)
    for token_id in set(seq.token_ids):
        r = params.repetition_penalty
        x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
        x[token_id] -= params.frequency_penalty * times[token_id]
        x[token_id] -= params.presence_penalty * (times[token_id] > 0)
    if not params.cuts or x.max() == -np.inf:
        return x, False
    weights = np.exp((x - x.max()) / params.temperature)
    close = bool((np.abs(weights - params.min_p) < GAP).any()) and params.min_p > 0
    weights[weights < params.min_p] = 0.0
    order = np.argsort(-weights, kind="stable")
    distances = -np.diff(np.sort(weights[weights > 0])[::-1])
    if params.top_k > 0:
        close |= bool(((distances < GAP) & (distances > 0)).any())
        weights[order[params.top_k :]] = 0.0
    if params.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        close |= bool((np.abs(before - params.top_p * weights.sum()) < GAP).any())
        close |= bool(((distances < GAP) & (distances > 0)).any())
        weights[order[before >= params.top_p * weights.sum()]] = 0.0
    x[weights == 0] = -np.inf
    return x, close


VALUES = st.sampled_from([-np.inf, -3.0, -0.5, 0.0, 0.0, 0.25, 1.0, 1.0, 2.5, 6.0])
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "top_k": st.sampled_from([0, 1, 2, 5, 100, 1000]),
        "top_p": st.sampled_from([0.01, 0.3, 0.55, 0.9, 0.999]),
        "min_p": st.sampled_from([0.01, 0.11, 0.7]),
        "repetition_penalty": st.sampled_from([0.5, 1.1, 2.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.25]),  # exact, so that sums tie in both
        "frequency_penalty": st.sampled_from([-0.125, 1.5]),
        "logit_bias": st.dictionaries(st.integers(0, 30), st.sampled_from([-9.0, 4.0]), max_size=4),
        "allowed_token_ids": st.lists(st.integers(0, 30), min_size=1, max_size=20),
        "min_tokens": st.integers(0, 4),
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    },
)
ROW = st.tuples(
    FIELDS,
    st.lists(st.integers(0, 30), min_size=1, max_size=12),  # prompt
    st.lists(st.integers(0, 30), max_size=12),  # output
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=2).map(tuple), max_size=3),
)


@pytest.mark.slow
@settings(max_examples=examples(400), deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=6), data=st.data())
def test_filters_equal_their_twin(rows: list[Any], data: st.DataObject) -> None:
    """Mixed batches, ties and infinities; 200 tokens are no whole number of blocks."""
    size = data.draw(st.sampled_from([31, 64, 200, 2000]))
    few = data.draw(st.lists(VALUES, min_size=8, max_size=31))
    seed = data.draw(st.integers(0, 2**32 - 1))
    picks = np.random.default_rng(seed).integers(0, len(few), (len(rows), size))
    logits = np.array(few, np.float32)[picks]
    seqs = [make_seq(SamplingParams(**fields), p, o, words) for fields, p, o, words in rows]
    inputs = sampler_inputs(seqs, size)
    got = torch.tensor(logits)
    assert bool(inputs.filters) == any(seq.is_narrowed for seq in seqs)
    narrow_all(got, inputs)
    for row, seq in enumerate(seqs):
        expected, close = twin(logits[row], seq)
        if np.isneginf(expected).all() or close:
            continue  # every token is forbidden, or rounding decides
        forbidden = torch.tensor(np.isneginf(expected))
        assert torch.equal(got[row] == -torch.inf, forbidden), (row, seq.params)
        torch.testing.assert_close(
            got[row][~forbidden], torch.tensor(expected[~forbidden.numpy()], dtype=torch.float32)
        )


FEW = st.integers(0, 3)  # so few tokens that they repeat, and make bad words
DRAFTED = st.tuples(
    FIELDS,
    st.lists(FEW, min_size=1, max_size=5),  # prompt
    st.lists(FEW, max_size=5),  # output
    st.lists(st.lists(FEW, min_size=1, max_size=4).map(tuple), max_size=3),
    st.lists(FEW, max_size=5),  # drafts
)


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(DRAFTED, min_size=1, max_size=4))
def test_a_draw_after_drafts_is_as_if_they_had_come(rows: list[Any]) -> None:
    """Each draft is followed by a draw of its own. The sequences do not change."""
    drafts, samples, after = {}, [], []
    for fields, prompt, output, words, guessed in rows:
        seq = make_seq(SamplingParams(**fields), prompt, output, words)
        drafts[seq] = guessed
        for offset in range(1 + len(guessed)):
            samples.append((seq, offset))
            after.append(make_seq(seq.params, prompt, output + guessed[:offset], words))
    seqs, offsets = [seq for seq, _ in samples], [offset for _, offset in samples]
    logits = torch.linspace(-2.0, 2.0, 31).roll(len(rows)).repeat(len(seqs), 1)
    expected, got, again = logits.clone(), logits.clone(), logits.clone()
    as_come, alone = sampler_inputs(after, 31), sampler_inputs([*drafts], 31)
    narrow_all(expected, as_come)
    inputs = sampler_inputs(seqs, 31, offsets=offsets, assumed=drafts)
    narrow_all(got, inputs)
    assert torch.equal(got, expected)
    assert inputs.keys is None or torch.equal(inputs.keys, as_come.keys)  # type: ignore[arg-type]
    narrow_all(got := logits.clone(), alone)
    narrow_all(again, sampler_inputs([*drafts], 31))
    assert torch.equal(again, got)


# Drawn from what is left


def draw(seqs: list[Sequence], logits: torch.Tensor) -> list[int]:
    inputs = sampler_inputs(seqs, logits.shape[1])
    tokens: list[int] = Sampler()(logits, inputs.temperatures, inputs.keys, inputs.filters).tolist()
    return tokens


@pytest.mark.sampled(share=0.5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (dict(top_k=3), [0.4, 0.3, 0.15, 0, 0]),
        (dict(top_p=0.8), [0.4, 0.3, 0.15, 0, 0]),
        (dict(min_p=0.2), [0.4, 0.3, 0.15, 0.1, 0]),
        (dict(temperature=0.5, top_k=2), [0.16, 0.09, 0, 0, 0]),
        (dict(logit_bias={4: float(np.log(8))}), [0.4, 0.3, 0.15, 0.1, 0.4]),
        (dict(allowed_token_ids=[1, 3]), [0, 0.3, 0, 0.1, 0]),
    ],
)
def test_draws_follow_the_filtered_distribution(
    fields: dict[str, Any], expected: list[float]
) -> None:
    """Chi-square of 20,000 seeded draws; with 4 degrees of freedom above 30 in 1 of 200,000 cases.

    The seeds are fixed, so the result is always the same.
    """
    logits = torch.tensor([log(0.4, 0.3, 0.15, 0.1, 0.05)]).repeat(20_000, 1)
    seqs = [make_seq(SamplingParams(seed=i, **fields), [0], []) for i in range(20_000)]
    counts = np.bincount(draw(seqs, logits), minlength=5)
    share = np.array(expected) / sum(expected)
    assert counts[share == 0].sum() == 0
    wanted = 20_000 * share[share > 0]
    assert ((counts[share > 0] - wanted) ** 2 / wanted).sum() < 30


def test_a_draw_does_not_depend_on_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in a batch, in another order: the same draw, with any parameters of the other rows."""
    torch.manual_seed(0)
    choices: list[dict[str, Any]] = [
        {}, dict(top_k=5), dict(top_p=0.9), dict(min_p=0.05, temperature=0.7), dict(temperature=0),
        dict(temperature=0, repetition_penalty=1.5), dict(top_k=40, top_p=0.5),
        dict(presence_penalty=1.0, top_p=0.99), dict(allowed_token_ids=[3, 9, 11]),
    ]  # fmt: skip
    seqs = [
        make_seq(SamplingParams(seed=i, **choices[i % 9]), [i, 2], [3] * (i % 4)) for i in range(90)
    ]
    logits = torch.randn(90, 3000) * 2
    together = draw(seqs, logits)
    monkeypatch.setitem(narrowing.NARROWED_LOGITS, "cpu", 3000 * 7)  # seven rows
    assert draw(seqs, logits) == together
    for order in (torch.randperm(90), torch.arange(89, -1, -1)):
        shuffled = draw([seqs[i] for i in order], logits[order])
        assert [together[i] for i in order] == shuffled
    assert [draw([seq], logits[i : i + 1])[0] for i, seq in enumerate(seqs)] == together


def test_plain_rows_are_not_filtered_with_the_others() -> None:
    """They are sampled from the raw logits, in their own type."""
    logits = torch.randn(4, 100).bfloat16()
    plain = [make_seq(SamplingParams(seed=i), [0], []) for i in range(4)]
    mixed = [*plain[:2], make_seq(SamplingParams(top_k=1), [0], []), plain[3]]
    assert not sampler_inputs(plain, 100).filters
    tokens = draw(mixed, logits)
    assert [tokens[i] for i in (0, 1, 3)] == [draw(plain, logits)[i] for i in (0, 1, 3)]
    assert tokens[2] == int(logits[2].argmax())
