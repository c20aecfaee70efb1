"""Grammars over small vocabularies, and what they allow, for tests."""

import itertools
import json
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nanovllm import SamplingParams, StructuredOutputs
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.structured.constraint import GrammarConstraint
from nanovllm.structured.grammars import Grammars
from nanovllm.structured.masks import Masks

# Tokens of several bytes, some of which begin or end inside of a character.
WORDS = [
    *(text.encode() for text in ('{"', '":', '",', '"}', "ab", "abc", "bc", "12", "null", "true")),
    *(text.encode() for text in ("é", "éa", " é", "日本", "本", "\n\n", ', "', "a}", "}]", "]}")),
    b"\xa9a", b"a\xc3", b"\xe6\x97", b"\xa5\xe6", b"\xf0\x9f\x98", b"\x80b",
]  # fmt: skip
EOS, OTHER_EOS, SPECIAL, THINK, CALL, END_CALL = (256 + len(WORDS) + i for i in range(6))
ADDED = ["<|eos|>", "<|end|>", "<|special|>", "</think>", "<call>", "</call>"]
SIZE = 256 + len(WORDS) + len(ADDED)


def _letters(text: bytes) -> str:
    """Bytes as byte-level tokenizers write them."""
    table = {b: chr(b) for b in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (b for b in range(256) if b not in table)
    table |= {b: chr(256 + i) for i, b in enumerate(others)}
    return "".join(table[b] for b in text)


def words_tokenizer() -> PreTrainedTokenizerFast:
    """All bytes in their order, then `WORDS`, then `ADDED`, whose first three are special."""
    vocab = {_letters(bytes([b])): b for b in range(256)}
    vocab |= {_letters(word): 256 + i for i, word in enumerate(WORDS)}
    merges = [("a", "b"), ("ab", "c"), ("1", "2"), (_letters(b"\xc3"), _letters(b"\xa9"))]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(ADDED[:3])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ADDED[3:]])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=ADDED[0])


BYTES = [*(bytes([b]) for b in range(256)), *WORDS, *(text.encode() for text in ADDED)]


TOKENIZER = words_tokenizer()


def words_grammars(vocab_size: int = SIZE) -> Grammars:
    return Grammars(TOKENIZER, vocab_size, (EOS, OTHER_EOS))


def masks_of(asked: list[tuple[GrammarConstraint, list[int]]]) -> npt.NDArray[np.int32]:
    """The bitmaps of several constraints, over memory that is not empty."""
    masks = Masks(asked)
    masks.array[:] = 0x5A5A5A5A
    masks.fill()
    return masks.array


def allowed(
    constraint: GrammarConstraint, drafts: Iterable[int] = (), vocab_size: int = SIZE
) -> set[int]:
    """The tokens that a mask allows."""
    (row,) = masks_of([(constraint, list(drafts))])
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab_size]
    return set(np.flatnonzero(bits).tolist())


def accepts(constraint: GrammarConstraint, text: str) -> bool:
    """Whether the constraint takes the text, byte by byte, and may end there."""
    matcher = constraint.after(list(text.encode()))
    return matcher is not None and matcher.is_accepting()


def constrain(grammars: Grammars, **asked: Any) -> GrammarConstraint:
    return grammars.constraint(StructuredOutputs(**asked))


def allowed_by(language: Collection[bytes], text: bytes) -> set[int]:
    """The oracle for a finite language: tokens that begin or complete one of its texts."""
    rests = [one[len(text) :] for one in language if one.startswith(text)]
    ends = {EOS, OTHER_EOS} if b"" in rests else set()
    return ends | {
        token_id
        for token_id, piece in enumerate(BYTES[: 256 + len(WORDS)])
        if any(rest.startswith(piece) for rest in rests)
    }


def forced_by(language: Collection[bytes], text: bytes) -> set[int]:
    """The token that the tokenizer makes of what must come next, if there is only one way on."""
    rests = [one[len(text) :] for one in language if one.startswith(text)]
    same = itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rests, strict=False))
    common = bytes(column[0] for column in same)
    if common and 0x80 <= common[0] < 0xC0:
        return {common[0]}  # inside of a character
    ids = TOKENIZER.backend_tokenizer.encode(common.decode(errors="ignore")).ids
    return set(ids[:1] or common[:1])


def sequence_of(token_ids: Iterable[int], **params: Any) -> Sequence:
    """A sequence with one token of prompt and this output."""
    seq = Sequence([0], SamplingParams(max_tokens=None, **params))
    seq.token_ids += token_ids
    return seq


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
