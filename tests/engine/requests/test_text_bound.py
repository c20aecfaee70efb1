"""A lower bound for the tokens of a text: never more than the tokenizer makes of it."""

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.requests import text_bound as bounds
from nanovllm.engine.requests.text_bound import BYTE_NAMES, check_long_text, text_bound

TEXT = (
    "The quick brown fox jumps over the lazy dog. " * 9
    + "def f(x):\n        return x + 12345\n" * 9
    + "größer \u00e9tat e\u0301tat \u0391\u0313\u0301 " * 9
    + "\u4f60\u597d\u4e16\u754c \uac00\u1100\u1161 " * 9
    + " " * 64 + "\n" * 20 + "-" * 50
)  # fmt: skip
WORDS = Regex(r"\s?\p{L}+|\p{N}{1,3}|\s+|[^\s\p{L}\p{N}]+")
SPLIT = pre_tokenizers.Split(WORDS, "isolated")
BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BLANKS = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
ADDED = (AddedToken("<|im end|>", special=True), AddedToken("long-added-word", normalized=True))
STRIPPING = (*ADDED, AddedToken("<mask>", lstrip=True, rstrip=True, special=True))


def byte_level(normalizer: Any = None, before: Any = SPLIT, added: Any = ADDED) -> Any:
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before, BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    return trained(tokenizer, trainer, added)


def with_blanks(normalizer: Any, before: Any = None, added: Any = ADDED, **options: Any) -> Any:
    options = {"byte_fallback": True, "unk_token": "<unk>", **options}
    tokenizer = Tokenizer(models.BPE(**options))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if before is not None:
        tokenizer.pre_tokenizer = before
    trainer = BpeTrainer(
        vocab_size=600, special_tokens=["<unk>", *BYTE_NAMES], limit_alphabet=60,
        show_progress=False,
    )  # fmt: skip
    return trained(tokenizer, trainer, added)


def trained(tokenizer: Tokenizer, trainer: BpeTrainer, added: Any) -> PreTrainedTokenizerFast:
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    tokenizer.add_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS: dict[str, Any] = {
    "bytes": lambda: byte_level(),
    "bytes, added tokens strip": lambda: byte_level(added=STRIPPING),
    "bytes of NFC": lambda: byte_level(normalizers.NFC()),
    "bytes of NFC, added tokens strip": lambda: byte_level(normalizers.NFC(), added=STRIPPING),
    "blanks": lambda: with_blanks(BLANKS),
    "blanks, added tokens strip": lambda: with_blanks(BLANKS, added=STRIPPING),
    "blanks, fused": lambda: with_blanks(BLANKS, fuse_unk=True),
    "blanks of Metaspace": lambda: with_blanks(None, pre_tokenizers.Metaspace()),
}
UNBOUND: dict[str, Any] = {
    "no bytes": lambda: with_blanks(BLANKS, byte_fallback=False),
    "lowercase": lambda: byte_level(normalizers.Lowercase()),
    "spaces are removed": lambda: byte_level(before=pre_tokenizers.Split(" ", "removed")),
    "words": lambda: PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    ),
    "none": lambda: None,
}


def least(tokenizer: Any, text: str) -> int:
    """The largest number of tokens that the bound says a text exceeds, plus one."""
    bound = text_bound(tokenizer)
    assert bound is not None
    low, high = -1, 2 * len(text.encode()) + 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound.is_exceeded(text, middle) else (low, middle)
    return low + 1


def odd_text(rng: random.Random) -> str:
    parts = (
        *TEXT.split(), " ", "  " * 40, "\n", "\u3000\u00a0\t" * 5, "e", "\u0301", "\u0338",
        "\u1100", "\u1161", "\u11a8", "▁", "<|im end|>", "<mask>", "long-added-word",
        "\u212b", "\U0001f600", "-" * 60, "\x00\x85", "\u09c7", "\u09be",
    )  # fmt: skip
    return "".join(rng.choice(parts) for _ in range(rng.randrange(1, 120)))


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_that_fits_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces are short here, so that many texts have some that begin with a mark."""
    monkeypatch.setattr(bounds, "PIECE", 16)
    monkeypatch.setattr(bounds, "NEAR", 4)
    tokenizer, rng = KINDS[kind](), random.Random(0)
    for _ in range(300):
        text = odd_text(rng)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        assert least(tokenizer, text) <= len(tokens), text


@pytest.mark.parametrize("kind", KINDS)
def test_long_prose_is_refused_without_tokenizing(kind: str) -> None:
    tokenizer, text = KINDS[kind](), TEXT[:405] * 500
    number = len(tokenizer.encode(text, add_special_tokens=False))
    assert least(tokenizer, text) > number / 8
    with pytest.raises(ValueError, match=r"must have 1 to 99 tokens \(limit\), got more: 202500"):
        check_long_text(tokenizer, text, 99, "limit")
    check_long_text(tokenizer, text, number, "limit")


@pytest.mark.parametrize("kind", UNBOUND)
def test_without_a_bound_nothing_is_refused(kind: str) -> None:
    tokenizer = UNBOUND[kind]()
    assert text_bound(tokenizer) is None
    check_long_text(tokenizer, "a b " * 100_000, 1, "limit")


def test_a_longer_added_token_changes_the_bound() -> None:
    tokenizer = byte_level()
    text = "x" * 1000
    assert least(tokenizer, text) > 30
    tokenizer.add_tokens([text])
    assert len(tokenizer.encode(text)) == 1 and least(tokenizer, text) <= 1


def test_little_is_read_at_a_time_and_no_more_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of a piece is one call that keeps other threads waiting."""
    counted: list[int] = []
    count = bounds.np.bincount

    def bincount(data: Any, minlength: int) -> Any:
        counted.append(len(data))
        return count(data, minlength=minlength)

    monkeypatch.setattr(bounds.np, "bincount", bincount)
    bound = text_bound(with_blanks(BLANKS))
    assert bound is not None
    text = TEXT * 1000
    assert not bound.is_exceeded(text, len(text))
    assert max(counted) <= 4 * bounds.PIECE and len(counted) >= len(text) // bounds.PIECE
    counted.clear()
    assert bound.is_exceeded(text, 100) and len(counted) == 1
