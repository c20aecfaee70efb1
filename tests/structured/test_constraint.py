"""Masks against a brute-force oracle, and what a follower must do: catch up, start over, end."""

import itertools
import random
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import SamplingParams, StructuredOutputs
from nanovllm.engine.requests.bad_words import BadWords
from nanovllm.engine.run.draw_inputs import draw_inputs
from nanovllm.engine.schedule.parts import End, SequenceParts
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.mask import mask
from nanovllm.structured.constraint import GrammarConstraint
from nanovllm.structured.masks import Masks
from tests.grammar_words import (
    BYTES,
    EOS,
    OTHER_EOS,
    SIZE,
    THINK,
    allowed,
    allowed_by,
    compact,
    constrain,
    forced_by,
    masks_of,
    sequence_of,
    words_grammars,
)

GRAMMARS = words_grammars()
CHOICES = ("abc", "ab", "abcé", "é", "éa", "日本", "日", "😀b", "12", "null\n\n", 'a"b', "a\\b")
PATTERN = r"(ab|c){0,3}[12]?|é(a|b)"
SCHEMA = {
    "type": "object",
    "properties": {
        "ab": {"enum": ["é", "日本", 12, None]},
        "b": {"const": [True, "abc"]},
        "é": {"type": "boolean"},
    },
    "required": ["b"],
    "additionalProperties": False,
}


def _of_schema() -> set[str]:
    """All texts of SCHEMA without whitespace."""
    texts = set()
    for ab, e in itertools.product(["é", "日本", 12, None, ...], [True, False, ...]):
        value = {"ab": ab, "b": [True, "abc"], "é": e}
        texts.add(compact({name: v for name, v in value.items() if v is not ...}))
    return texts


def _of_pattern() -> set[str]:
    words = ("".join(w) for n in range(8) for w in itertools.product("abcé12", repeat=n) if n < 7)
    texts = {w for w in words if re.fullmatch(PATTERN, w)}
    return texts | {"ababab" + end for end in ("", "1", "2")}


LANGUAGES = [
    (StructuredOutputs(choice=CHOICES), set(CHOICES)),
    (StructuredOutputs(regex=PATTERN), _of_pattern()),
    (StructuredOutputs(json=SCHEMA, disable_any_whitespace=True), _of_schema()),
    (
        StructuredOutputs(grammar='start: "ab" rest?\nrest: "é" | "12" rest2\nrest2: "\\n\\n"?'),
        {"ab", "abé", "ab12", "ab12\n\n"},
    ),
    (StructuredOutputs(grammar='root ::= "a" [bc] ("12" | "é")?'),
     {"a" + x + y for x in "bc" for y in ("", "12", "é")}),
]  # fmt: skip
KINDS = ["choice", "regex", "json", "lark", "gbnf"]


@pytest.mark.parametrize(("asked", "texts"), LANGUAGES, ids=KINDS)
def test_masks_equal_brute_force(asked: StructuredOutputs, texts: set[str]) -> None:
    """In all states that any tokens lead to; the languages are finite, so the oracle is exact.

    Where there is one way on, a mask has only the token that the tokenizer would make.
    """
    language = {text.encode() for text in texts}
    seen, left = set(), [((), b"")]
    while left:
        ids, text = left.pop()
        if text in seen:  # the rest depends on the bytes alone
            continue
        seen.add(text)
        constraint = GRAMMARS.constraint(asked)
        constraint.update(sequence_of(ids))
        found = allowed(constraint)
        if found != allowed_by(language, text):
            assert found == forced_by(language, text), (ids, text)
            assert found < allowed_by(language, text)
        left += [((*ids, i), text + BYTES[i]) for i in found - {EOS, OTHER_EOS}]
    assert language <= seen


@pytest.mark.parametrize(("asked", "texts"), LANGUAGES, ids=KINDS)
def test_forced_tokens_are_all_that_masks_leave(asked: StructuredOutputs, texts: set[str]) -> None:
    """One after the other, from all states; a token that ends the output is none of them."""
    language = {text.encode() for text in texts}

    def goes_on(text: bytes) -> bool:
        return any(other.startswith(text) and other != text for other in language)

    seen, left, number_forced = set(), [((), b"")], 0
    while left:
        ids, text = left.pop()
        if text in seen:
            continue
        seen.add(text)
        constraint, seq = GRAMMARS.constraint(asked), sequence_of(ids)
        forced = constraint.forced(seq, 99)
        number_forced += len(forced)
        for number, token_id in enumerate(forced):
            assert allowed(constraint, forced[:number]) == {token_id}
        assert not forced or goes_on(text + b"".join(BYTES[i] for i in forced))
        assert [constraint.forced(seq, n) for n in range(3)] == [forced[:n] for n in range(3)]
        found = allowed(constraint)
        if not forced and len(found) == 1:
            assert not goes_on(text + BYTES[min(found)])
        left += [((*ids, i), text + BYTES[i]) for i in found - {EOS, OTHER_EOS}]
    assert number_forced > 0 or "::=" in (asked.grammar or "")  # "ab" may come at once


def test_nothing_is_forced_before_the_marker_or_after_an_error() -> None:
    constraint = constrain(GRAMMARS, choice=["abcd12"], after="</think>")
    seq = sequence_of([ord("a")])
    assert constraint.forced(seq, 9) == []
    seq.token_ids.append(THINK)
    assert constraint.forced(seq, 9) == [BYTES.index(b"abc"), ord("d")]
    constraint.excluded = (ord("d"),)
    assert constraint.forced(seq, 9) == [BYTES.index(b"abc")]
    seq.token_ids.append(ord("x"))
    assert constraint.forced(seq, 9) == []


def test_asking_for_forced_tokens_changes_nothing() -> None:
    constraint = constrain(GRAMMARS, choice=["abcd12", "abcd12e"])
    seq = sequence_of([ord("a")])
    before = constraint.forced(seq, 9)
    assert [BYTES[i] for i in before] == [b"b", b"c", b"d", b"12"]
    assert constraint.forced(seq, 9) == before and allowed(constraint) == {before[0]}
    seq.token_ids += b"bcd"  # otherwise than the tokenizer would
    assert constraint.update(seq) is None
    assert allowed(constraint) == {BYTES.index(b"12")}


@settings(max_examples=50, deadline=None)
@given(data=st.data(), which=st.integers(0, len(LANGUAGES) - 1))
def test_masks_after_drafts_equal_those_after_tokens(data: st.DataObject, which: int) -> None:
    """And nothing is left of the drafts: several at once, wrong ones too."""
    asked, _ = LANGUAGES[which]
    constraint = GRAMMARS.constraint(asked)
    seed = data.draw(st.integers(0, 2**32))
    chosen: list[int] = []
    rng = random.Random(seed)
    for _ in range(data.draw(st.integers(0, 4))):
        ways = sorted(allowed(constraint, chosen) - {EOS, OTHER_EOS})
        if not ways:
            break
        chosen.append(rng.choice(ways))
    before = allowed(constraint)
    known = GRAMMARS.constraint(asked)
    if known.update(sequence_of(chosen)) is None:
        assert allowed(known) == allowed(constraint, chosen)
    assert allowed(constraint) == before
    wrong = [*chosen, 0]  # no text here has the byte 0
    assert allowed(constraint, wrong) == set(range(SIZE)) - {EOS, OTHER_EOS}
    assert allowed(constraint) == before


def test_many_masks_at_once_equal_single_ones() -> None:
    """On several threads, with drafts, free text and constraints of one sequence repeated.

    Some may end with any token that ends a sequence, some with one, some with none.
    """
    asked = []
    ends = ((), (EOS,), (EOS, OTHER_EOS))
    for (structured, _), may_end in zip(LANGUAGES * 4, itertools.cycle(ends), strict=False):
        constraint = GRAMMARS.constraint(structured, may_end)
        first = min(allowed(constraint) - {EOS, OTHER_EOS})
        asked += [(constraint, []), (constraint, [first]), (constraint, [first])]
    free = constrain(GRAMMARS, choice=["ab"], after="</think>")
    asked += [(free, []), (free, [THINK])]
    together = masks_of(asked)
    for row, one in zip(together, asked, strict=True):
        assert (row == masks_of([one])[0]).all()


@pytest.mark.parametrize("vocab_size", [SIZE - 40, SIZE - 1, SIZE + 5, SIZE + 200])
def test_a_model_may_have_fewer_or_more_tokens_than_the_tokenizer(vocab_size: int) -> None:
    grammars = words_grammars(vocab_size)
    several = [constrain(grammars, regex="[abé]+") for _ in range(6)]
    expected = {i for i, b in enumerate(BYTES) if re.fullmatch(rb"[ab\xc3\xa9]+", b)}
    for drafts, ends in ([], set()), ([ord("a")], {EOS, OTHER_EOS}):
        masks = masks_of([(constraint, drafts) for constraint in several])
        assert masks.shape[1] >= -(-vocab_size // 32)
        found = allowed(several[0], drafts, vocab_size)
        begun = {i for i in expected if BYTES[i][0] != 0xA9}
        assert found == {i for i in begun | ends if i < vocab_size}


def test_rows_of_one_constraint_are_alike() -> None:
    """As after drafts that are fewer than others have."""
    constraint = constrain(words_grammars(), choice=["abc", "12"])
    masks = masks_of([(constraint, [])] * 9)
    assert (masks == masks[0]).all() and masks[0].any()


def test_it_ends_where_nothing_can_follow() -> None:
    constraint = constrain(GRAMMARS, choice=["ab", "abc"])
    seq = sequence_of([ord("a")])
    assert constraint.update(seq) is None
    seq.token_ids.append(ord("b"))
    assert constraint.update(seq) is None  # "abc" is possible
    assert {EOS, OTHER_EOS, ord("c")} == allowed(constraint)
    seq.token_ids.append(ord("c"))
    assert constraint.update(seq) == End("stop")
    assert allowed(constraint) == {EOS, OTHER_EOS}


def test_it_may_end_with_the_tokens_that_end_the_sequence_alone() -> None:
    asked = StructuredOutputs(regex="a*")
    for ends in ((), (EOS,), (OTHER_EOS,), (EOS, OTHER_EOS)):
        assert allowed(GRAMMARS.constraint(asked, ends)) >= set(ends)
        assert not allowed(GRAMMARS.constraint(asked, ends)) & ({EOS, OTHER_EOS} - set(ends))


def test_it_starts_over_when_tokens_are_taken_back() -> None:
    constraint = constrain(GRAMMARS, choice=["abc", "éa"])
    seq = sequence_of([])
    first = allowed(constraint)
    seq.token_ids += [ord("a"), ord("b")]
    constraint.update(seq)
    del seq.token_ids[2:]
    constraint.update(seq)
    assert allowed(constraint) == {ord("b")}
    constraint.reset()
    assert allowed(constraint) == first
    constraint.update(seq)
    assert allowed(constraint) == {ord("b")}
    assert constraint.update(seq) is None  # nothing is new


def test_it_starts_over_after_its_end() -> None:
    constraint = constrain(GRAMMARS, choice=["ab"])
    seq = sequence_of([ord("a"), ord("b")])
    assert constraint.update(seq) == End("stop")
    constraint.reset()
    assert constraint.update(seq) == End("stop")
    seq.token_ids.pop()
    assert constraint.update(seq) is None
    assert allowed(constraint) == {ord("b")}


def test_tokens_in_flight_are_not_followed() -> None:
    constraint = constrain(GRAMMARS, choice=["ab"])
    seq = sequence_of([ord("a"), -1])
    seq.num_pending_tokens = 1
    assert constraint.update(seq) is None
    assert allowed(constraint) == {ord("b")}


def test_a_token_that_is_not_allowed_is_an_error_that_a_reset_heals() -> None:
    constraint = constrain(GRAMMARS, choice=["ab"])
    seq = sequence_of([ord("a"), ord("x")])
    end = constraint.update(seq)
    assert end is not None
    assert end.reason == "error"
    assert "no token to draw" in (end.stop_reason or "")
    seq.token_ids[2] = ord("b")
    constraint.reset()
    assert constraint.update(seq) == End("stop")


def test_constraints_of_one_grammar_are_independent() -> None:
    one, other = (constrain(GRAMMARS, choice=["ab", "cd"]) for _ in range(2))
    one.update(sequence_of([ord("a")]))
    other.update(sequence_of([ord("c")]))
    assert allowed(one) == {ord("b")}
    assert allowed(other) == {ord("d")}


def test_a_dead_end_allows_nothing() -> None:
    """llguidance allows EOS where a schema that refers to itself can never go on.

    If that is within the first tokens, the schema is refused.
    """
    schema = {
        "type": "object",
        "properties": {"p": {"const": "x" * 40}, "a": {"$ref": "#/$defs/a"}},
        "required": ["p", "a"],
        "$defs": {"a": {"$ref": "#/$defs/a"}},
    }
    constraint = constrain(GRAMMARS, json=schema, disable_any_whitespace=True)
    seq = sequence_of(b'{"p":"' + b"x" * 40 + b'","a":')
    assert constraint.update(seq) is None
    assert allowed(constraint) == set()


@pytest.mark.parametrize("marker", ["</think>", "<|special|>", "é\n", "b"])
def test_text_before_the_marker_is_free(marker: str) -> None:
    """The marker may be a token of its own, or be written in parts."""
    ways = [list(marker.encode())]
    ways += [[i] for i, text in enumerate(BYTES) if text == marker.encode() and i > 255]
    for written in ways:
        constraint = constrain(GRAMMARS, choice=["ab", "cd"], after=marker)
        before = list("aé<|sp</thin".encode())
        seq = sequence_of(before)
        assert constraint.update(seq) is None
        assert allowed(constraint) == set(range(SIZE)) - {EOS, OTHER_EOS}
        assert allowed(constraint, [*written, ord("a")]) == {ord("b")}
        seq.token_ids += written
        assert constraint.update(seq) is None
        assert allowed(constraint) == allowed_by({b"ab", b"cd"}, b"")
        seq.token_ids += b"cd"
        assert constraint.update(seq) == End("stop")
        constraint.reset()
        assert constraint.update(seq) == End("stop")
        del seq.token_ids[-3:]  # into the marker
        assert constraint.update(seq) is None
        assert allowed(constraint) == set(range(SIZE)) - {EOS, OTHER_EOS}


def test_threads_may_follow_at_the_same_time() -> None:
    def follow(seed: int) -> bool:
        rng = random.Random(seed)
        constraint = constrain(GRAMMARS, json=SCHEMA, disable_any_whitespace=True)
        seq, text = sequence_of([]), b""
        language = {text.encode() for text in _of_schema()}
        while constraint.update(seq) is None:
            found = allowed(constraint)
            if found not in (allowed_by(language, text), forced_by(language, text)):
                return False
            seq.token_ids.append(rng.choice(sorted(found)))
            text += BYTES[seq.token_ids[-1]]
        return text in language

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(follow, range(64)))


def test_copies_of_a_constraint_are_not_needed_to_look_ahead() -> None:
    """`after` leaves the constraint as it is, also if the caller consumes more."""
    constraint: GrammarConstraint = constrain(GRAMMARS, choice=["abc"])
    matcher = constraint.after([ord("a")])
    assert matcher is not None
    assert matcher.consume_token(ord("b"))
    assert allowed(constraint) == {BYTES.index(b"abc")}
    assert constraint.num_words == -(-SIZE // 32)


def test_tokens_that_may_not_come_are_cleared_from_the_mask() -> None:
    """Stops before `min_tokens`, and bad words: such rows are drawn like any with a mask alone."""
    constraints = [constrain(GRAMMARS, regex="[a-d]*"), constrain(GRAMMARS, json_object=True)]
    params = SamplingParams(min_tokens=1, stop_token_ids=[ord("c")])
    seqs = [
        Sequence(
            [0],
            params,
            parts=SequenceParts(bad_words=BadWords([(ord("a"),)]), constraint=constraints[0]),
        ),
        Sequence([0], SamplingParams(), parts=SequenceParts(constraint=constraints[1])),
    ]
    expected = [allowed(constraint) for constraint in constraints]
    assert {ord("a"), ord("c")} <= expected[0]
    (part,) = draw_inputs(seqs, SIZE, "cpu").filters
    assert part.sole_masks is not None
    logits = torch.zeros(2, SIZE)
    mask(logits, part.sole_masks)
    left = [set(torch.isfinite(row).nonzero()[:, 0].tolist()) for row in logits]
    assert left == [expected[0] - {ord("a"), ord("c"), *seqs[0].eos_token_ids}, expected[1]]


def test_ids_that_the_tokenizer_has_not_are_no_text() -> None:
    """A model may have more tokens; such a one cannot complete a marker."""
    grammars = words_grammars(SIZE + 40)
    for marker in ("<[", "5]>", f"<[{SIZE + 3}]>"):
        constraint = constrain(grammars, choice=["ab"], after=marker)
        assert constraint.update(sequence_of([SIZE + 3, SIZE + 5])) is None
        assert constraint.after([]) is None


REST = {  # what a token may have behind the marker, by the grammar
    "choice": (dict(choice=["ab", "\n\nab"]), {b"ab", b"\n\nab"}),
    "regex": (dict(regex="bc?12"), {b"b12", b"bc12"}),
    "json": (dict(json={"enum": [12]}, disable_any_whitespace=True), {b"12"}),
}


@pytest.mark.parametrize("kind", REST)
@pytest.mark.parametrize("marker", ["xa", "yab", "x\xe9", "z\n", "z12", "x a", "a"])
def test_the_rest_of_the_token_that_completes_a_marker_is_constrained(
    kind: str, marker: str
) -> None:
    """Or is white space. Every token is tried behind every beginning of the marker."""
    asked, language = REST[kind]
    text = marker.encode()
    for length in range(len(text)):
        before = [*b"q", *text[:length]]
        constraint = constrain(GRAMMARS, **asked, after=marker)
        assert constraint.update(sequence_of(before)) is None
        assert constraint.after([]) is None
        may = allowed(constraint)
        assert may == allowed(constrain(GRAMMARS, **asked, after=marker), before)
        for token_id, piece in enumerate(BYTES):
            whole = b"q" + text[:length] + piece
            _, found, rest = whole.partition(text)
            takes = {
                one for one in (rest, rest.lstrip()) if any(t.startswith(one) for t in language)
            }
            if token_id in (EOS, OTHER_EOS):
                assert token_id not in may
                continue
            assert (token_id in may) == (not found or bool(takes)), (before, piece)
            if found and takes:
                behind = constraint.after([token_id])
                assert behind is not None
                begun = max(takes, key=len)
                expected = {t[len(begun) :] for t in language if t.startswith(begun)}
                follow = constrain(GRAMMARS, **asked, after=marker)
                seq = sequence_of([*before, token_id])
                end = follow.update(seq)
                assert (end == End("stop")) == (expected == {b""})
                if expected != {b""}:
                    assert allowed(follow) == allowed(constraint, [token_id])
                    for one in expected:
                        done = sequence_of([*before, token_id, *one])
                        assert constrain(GRAMMARS, **asked, after=marker).update(done) == End(
                            "stop"
                        )


def empty_masks(*words: int) -> Masks:
    """The mask of a row, not filled by its constraint."""
    masks = Masks([(SimpleNamespace(num_words=len(words)), [])])  # type: ignore[list-item]
    masks.array[0] = words
    return masks


def test_a_list_of_ids_keeps_their_bits_only() -> None:
    masks = empty_masks(-1, 0b111)
    masks.keep_only(0, [3, 33, 35])
    assert masks.array.tolist() == [[1 << 3, 1 << 1]], "35 was not allowed before"
