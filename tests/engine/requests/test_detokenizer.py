"""Detokenizer: the pieces join to `decode` of all ids, and each comes as soon as it is certain."""

from collections.abc import Callable
from functools import cache
from itertools import cycle, islice, product
from typing import Any

import pytest
from conftest import byte_tokenizer
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selection import examples
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from nanovllm.engine.requests.detokenizer import Detokenizer
from nanovllm.openai import long_texts

TEXTS = [
    "Hello, world!", "\n", "", "   leading", "trailing   ", " " * 50, "你好世界", "🙂" * 20,
    "family 👨\u200d👩\u200d👧, flags 🇩🇪🇯🇵, thumbs 👍🏽", "cafe\u0301 n\u0303 Z\u0351\u036b\u0343",
    "مرحبا بالعالم", "\u202eright\u202c to left", "def f(x):\n    return x  # \t tab\n\n\n",
    "\uffff\ufffe\ud7ff\ue000\U0010ffff", "\x00\x7f\x80\u07ff\u0800", "\ufffd",
    "a\ufffdb\ufffd\ufffd", "do n't , ' do ' it 's . we 've n' v '",
]  # fmt: skip


def wrap(tokenizer: Tokenizer, **options: Any) -> PreTrainedTokenizerFast:
    """As transformers loads it, with added tokens of both kinds."""
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("né", special=False)])
    tokenizer.add_special_tokens(["<s>", "</s>", "<|é|>"])
    options = {"clean_up_tokenization_spaces": False} | options
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", **options)


def merged_bytes(**options: Any) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges that cut through characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 2, trainer)
    return wrap(tokenizer, **options)


def cleaned_bytes() -> PreTrainedTokenizerFast:
    """Llama 3's kind: clean-up after byte-level BPE, which transformers 5 does only if forced."""
    force = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    tokenizer = merged_bytes(clean_up_tokenization_spaces=True, **{force: True})
    assert tokenizer.decode(tokenizer.encode("it 's .")) == "it's."
    return tokenizer


PIECES = ["▁", "▁▁", "▁a", "a", "b", "n", "'", "▁'", ".", "中", "\ufffd", "▁\ufffd", "\n", "▁▁▁▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TO_SPACE = decoders.Replace("▁", " ")


def sentencepiece(*decoder: Any) -> PreTrainedTokenizerFast:
    """Llama 2's kind: "▁" for spaces, and bytes for what is in no piece."""
    vocab = {token: i for i, token in enumerate(["<unk>", *BYTES, *PIECES])}
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("▁", "'"), ("▁", "\ufffd")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(list(decoder))
    return wrap(tokenizer)


def unigram(byte_fallback: bool = False, **options: Any) -> PreTrainedTokenizerFast:
    """T5's kind: Metaspace, whose decoder takes every "▁" out of the first token."""
    extra = BYTES if byte_fallback else []
    vocab = [(token, -float(i)) for i, token in enumerate(["<unk>", *PIECES, *extra])]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=byte_fallback))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    metaspace = decoders.Metaspace()
    steps = [decoders.ByteFallback(), metaspace]
    tokenizer.decoder = decoders.Sequence(steps) if byte_fallback else metaspace
    return wrap(tokenizer, **options)


def words(model: Any, decoder: Any, **options: Any) -> PreTrainedTokenizerFast:
    pieces = ["[UNK]", "do", "n't", "'", "s", "##s", ".", ",", "n", "v", "re", "##'", "##n", "!",
              "x</w>", "</w>", "'s", "##", " '", "? ", "m", "ve"]  # fmt: skip
    tokenizer = Tokenizer(model({token: i for i, token in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    return wrap(tokenizer, **options)


LLAMA = (TO_SPACE, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
MAKERS: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "bytes": byte_tokenizer,
    "merged bytes": merged_bytes,
    "cleaned bytes": cleaned_bytes,
    "llama": lambda: sentencepiece(*LLAMA),
    "gemma": lambda: sentencepiece(*LLAMA[:3]),
    "unigram": unigram,
    "unigram with bytes": lambda: unigram(byte_fallback=True),
    "cleaned unigram": lambda: unigram(True, clean_up_tokenization_spaces=True),
    "bert": lambda: words(models.WordPiece, decoders.WordPiece(cleanup=True)),
    "cleaned bert": lambda: words(
        models.WordPiece, decoders.WordPiece(cleanup=False), clean_up_tokenization_spaces=True
    ),
    "suffix": lambda: words(models.WordLevel, decoders.BPEDecoder("</w>")),
    "joined words": lambda: words(models.WordLevel, None, clean_up_tokenization_spaces=True),
}
BYTE_LEVEL = ["bytes", "merged bytes", "cleaned bytes"]
BYTE_FALLBACK = ["llama", "gemma", "unigram with bytes", "cleaned unigram"]
make = cache(lambda name: MAKERS[name]())
every_tokenizer = pytest.mark.parametrize("name", MAKERS)
fuzz = settings(max_examples=examples(120), deadline=None)


@cache
def pool(name: str) -> list[int]:
    """Ids that fuzzing should draw often: added tokens, no tokens, and pieces of hard text."""
    tokenizer = make(name)
    odd = [id_ for id_ in range(len(tokenizer)) if len(tokenizer.decode([id_, id_])) <= 4]
    hard = [id_ for text in TEXTS for id_ in tokenizer.encode(text, add_special_tokens=False)]
    return [*range(len(tokenizer) - 5, len(tokenizer) + 2), 10**6, *odd, *dict.fromkeys(hard)]


def id_lists(name: str, max_size: int = 40) -> st.SearchStrategy[list[int]]:
    """Random ids; a few of them repeated make the long runs and the collisions."""
    one = st.sampled_from(pool(name)) | st.integers(0, len(make(name)) + 2)
    few = st.lists(one, min_size=1, max_size=4)
    runs = few.flatmap(lambda ids: st.lists(st.sampled_from(ids), max_size=max_size))
    return st.lists(one, max_size=max_size) | runs | st.builds(lambda a, b: a + b, runs, runs)


def utf8_lists(name: str) -> st.SearchStrategy[list[int]]:
    """Ids of bytes: characters of all lengths, some cut short, some with a byte too many."""
    lone = st.sampled_from([b"\x80", b"\xbf", b"\xc3", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xff", b"a"])
    some = st.sampled_from("aé中🙂\ufffd ").map(str.encode) | lone
    joined = st.lists(some, max_size=15).map(b"".join)
    return joined.map(lambda data: byte_ids(name, data))


def byte_ids(name: str, data: bytes) -> list[int]:
    """One id for each byte."""
    names = BYTES
    if name in BYTE_LEVEL:  # GPT-2's rule: printable Latin-1 as it is, the others from U+0100 on
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        names = [chr(256 + others.index(b)) if b in others else chr(b) for b in range(256)]
    ids: list[int] = make(name).convert_tokens_to_ids([names[byte] for byte in data])
    return ids


def stream(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> list[str]:
    """What each add and then finish return."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.finish()]


def check(tokenizer: Any, ids: list[int], skip_special_tokens: bool = True) -> None:
    """All of the text comes, and nothing that finish would have to take back."""
    pieces = stream(tokenizer, ids, skip_special_tokens)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)


def common_prefix(texts: list[str]) -> str:
    first, last = min(texts), max(texts)
    end = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), None)
    return first[:end]


# All of the text, and nothing but the text


@pytest.mark.slow
@every_tokenizer
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_pieces_of_any_ids_join_to_their_text(name: str, skip_special_tokens: bool) -> None:
    """No lost space, no wrong or repeated character."""

    @fuzz
    @given(id_lists(name))
    def run(ids: list[int]) -> None:
        check(make(name), ids, skip_special_tokens)

    run()


@pytest.mark.slow
@every_tokenizer
def test_slices_of_tokens_join_to_their_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "SLICE", 3)

    lists = id_lists(name)
    if name in BYTE_LEVEL + BYTE_FALLBACK:
        lists |= utf8_lists(name)

    @fuzz
    @given(lists)
    def run(ids: list[int]) -> None:
        ids = [token_id for token_id in ids if token_id is not None]
        assert long_texts.decoded(make(name), ids) == make(name).decode(ids)

    run()


def test_a_slice_after_a_token_without_a_text_is_not_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first token's spaces are dropped, and ids of no token count as none."""
    monkeypatch.setattr(long_texts, "SLICE", 3)
    tokenizer = make("unigram")
    spaces, unknown = tokenizer.convert_tokens_to_ids("▁▁▁▁"), len(tokenizer)
    for ids in ([spaces, unknown, unknown, spaces], [unknown, unknown, unknown, spaces]):
        assert long_texts.decoded(tokenizer, ids) == tokenizer.decode(ids)
    assert tokenizer.decode([spaces, unknown, unknown, spaces]) == "    "


@pytest.mark.parametrize("name", BYTE_LEVEL + BYTE_FALLBACK)
def test_pieces_of_any_bytes_join_to_their_text(name: str) -> None:
    """Bytes of characters, which random ids rarely form, whole or cut short."""

    @fuzz
    @given(utf8_lists(name), id_lists(name, max_size=3))
    def run(ids: list[int], after: list[int]) -> None:
        check(make(name), ids + after)

    run()


@every_tokenizer
def test_pieces_with_clean_up_join_to_their_text(name: str) -> None:
    """A later token may rewrite text: "do" + " n" + "'t" is "don't"."""
    tokenizer = make(name)
    hard = [
        "do",
        " n't",
        " ' ",
        " '",
        "'",
        " ",
        "s",
        " .",
        "n",
        "n'",
        "v",
        "t",
        "ve",
        "!",
        "\n",
        "r",
    ]
    parts = [tokenizer.encode(text, add_special_tokens=False) for text in hard]

    @fuzz
    @given(st.lists(st.sampled_from(parts), max_size=20))
    def run(chosen: list[list[int]]) -> None:
        check(tokenizer, [token_id for part in chosen for token_id in part])

    run()


@every_tokenizer
def test_pieces_of_real_text_join_to_it(name: str) -> None:
    """Emoji, combining marks, scripts of three bytes, code, spaces."""
    tokenizer = make(name)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        check(tokenizer, ids)
        if name in ("bytes", "merged bytes", "llama"):  # they lose nothing
            assert "".join(stream(tokenizer, ids)) == text


@every_tokenizer
def test_no_output_is_no_text(name: str) -> None:
    """`finish` works without any token."""
    assert stream(make(name), []) == [""]


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_special_tokens_inside_a_character(skip_special_tokens: bool) -> None:
    """A skipped token does not end a character; a shown one does."""
    tokenizer = make("bytes")
    ids = byte_ids("bytes", "中".encode())
    ids.insert(2, tokenizer.eos_token_id)
    pieces = (
        ["", "", "", "中", ""] if skip_special_tokens else ["", "", "\ufffd<|eos|>", "", "\ufffd"]
    )
    assert stream(tokenizer, ids, skip_special_tokens) == pieces


def test_only_the_first_shown_token_loses_its_space() -> None:
    """A skipped token before it does not count as the first."""
    tokenizer = make("llama")
    bos, a = tokenizer.convert_tokens_to_ids(["<s>", "▁a"])
    assert stream(tokenizer, [bos, a, bos, a]) == ["", "a", "", " a", ""]
    assert stream(tokenizer, [bos, a, a], skip_special_tokens=False) == ["<s>", " a", " a", ""]


def test_ids_in_no_vocabulary_have_no_text() -> None:
    """Models have more logits than tokenizers have tokens, and padding may be sampled."""
    assert stream(make("bytes"), [400, *byte_ids("bytes", b"a"), 10**6]) == ["", "a", "", ""]


# Equal to decoding every token with its neighbours


class Wrapper:
    """A tokenizer that is none of transformers', so that no token is looked up."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)


@pytest.mark.slow
@every_tokenizer
@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_tokens_that_are_looked_up_come_as_if_decoded(name: str, skip_special_tokens: bool) -> None:
    """The same pieces at the same tokens, with and without the lookup."""
    tokenizer = make(name)
    slow = Wrapper(tokenizer)

    has_bytes = name in BYTE_LEVEL + BYTE_FALLBACK

    @fuzz
    @given(id_lists(name) | utf8_lists(name) if has_bytes else id_lists(name), id_lists(name))
    def run(ids: list[int], more: list[int]) -> None:
        ids += more
        expected = stream(slow, ids, skip_special_tokens)
        assert stream(tokenizer, ids, skip_special_tokens) == expected

    run()


@pytest.mark.parametrize(
    ("name", "text"), [("bytes", "plain"), ("llama", "a aa"), ("gemma", "a a"), ("unigram", "a b"),
                       ("bert", "do s ! m"), ("merged bytes", "Hello 你好世界, world")],
)  # fmt: skip
def test_a_plain_token_is_decoded_once_for_all_sequences(name: str, text: str) -> None:
    """Later sequences look it up; only their first token and their end are decoded."""
    tokenizer = MAKERS[name]()
    ids = tokenizer.encode(text, add_special_tokens=False) * 20
    num_calls = 0
    decode = tokenizer.decode

    def count(*args: Any, **options: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        return decode(*args, **options)

    tokenizer.decode = count  # type: ignore[method-assign]
    expected = stream(tokenizer, ids)
    num_calls = 0
    assert stream(tokenizer, ids) == expected
    assert num_calls <= 4


def test_a_token_that_is_added_later_has_its_text() -> None:
    """Its id had no text before."""
    tokenizer = byte_tokenizer()
    new, a = len(tokenizer), byte_ids("bytes", b"a")[0]
    assert stream(tokenizer, [a, new]) == ["a", "", ""]
    tokenizer.add_tokens(["<new>"])
    assert stream(tokenizer, [a, new, new]) == ["a", "<new>", "<new>", ""]


def test_a_class_that_decodes_in_its_own_way_is_asked_each_time() -> None:
    """Its `decode` may look at neighbours."""

    class Spelled(PreTrainedTokenizerFast):
        def _decode(self, token_ids: Any, *args: Any, **options: Any) -> str:
            decode = super()._decode
            return "-".join(decode([one], *args, **options) for one in token_ids)

    tokenizer = Spelled(tokenizer_object=byte_tokenizer().backend_tokenizer)
    ids = byte_ids("bytes", b"abc")
    assert stream(tokenizer, ids) == ["a", "-b", "-c", ""]


def test_a_decoder_in_python_is_asked_each_time() -> None:
    """`tokenizers` cannot say what it does."""

    class Joined:
        def decode_chain(self, tokens: list[str]) -> list[str]:
            return ["-".join(tokens)]

    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Decoder.custom(Joined())
    assert stream(tokenizer, byte_ids("bytes", b"abc")) == ["a", "-b", "-c", ""]


def test_clean_up_that_is_not_done_delays_nothing() -> None:
    """transformers 5 ignores the option of Llama 3's tokenizers, which transformers 4 obeys."""
    tokenizer = merged_bytes(clean_up_tokenization_spaces=True)
    ids = byte_ids("bytes", b"a .")
    pieces = ["a", " ", ".", ""]
    if tokenizer.decode(ids) == "a.":
        pieces = ["a", "", ".", ""]
    assert stream(tokenizer, ids) == pieces


# Whole characters, in time


def test_a_character_comes_in_one_piece() -> None:
    """Not as one U+FFFD for each byte."""
    pieces = stream(make("bytes"), byte_ids("bytes", "a🙂é中".encode()))
    assert pieces == ["a", "", "", "", "🙂", "", "é", "", "", "中", ""]


@pytest.mark.parametrize(
    ("data", "pieces"),
    [(b"\xe4a", ["", "\ufffda", ""]),
     (b"\xf0\x9f\x98a", ["", "", "", "\ufffda", ""]),
     (b"\xe4\xe4\xb8\xad", ["", "\ufffd", "", "中", ""]),
     (b"\x80\x80a", ["", "\ufffd", "\ufffda", ""]),
     (b"\xed\xa0\x80a", ["", "\ufffd", "\ufffd", "\ufffda", ""]),  # a surrogate
     (b"a\xe4\xb8", ["a", "", "", "\ufffd"]),
     (b"\xef\xbf\xbda", ["", "", "", "\ufffda", ""])],  # U+FFFD itself
)  # fmt: skip
def test_invalid_bytes_come_with_the_next_token(data: bytes, pieces: list[str]) -> None:
    """A stream goes on after invalid bytes, and keeps a genuine U+FFFD."""
    assert stream(make("bytes"), byte_ids("bytes", data)) == pieces


@pytest.mark.parametrize(
    ("data", "pieces"),
    [(b"a\xf0\x9f\x99\x82", ["", "", "", "", "", "a🙂", ""]),
     (b"a\xff", ["", "\ufffd", "\ufffd▁", ""]),  # even the "a" is none, after the \xff
     (b"\xe4\xe4\xb8\xad", ["", "\ufffd", "\ufffd", "\ufffd", "\ufffd▁", ""]),
     (b"\xe4", ["", "\ufffd▁", ""])],
)  # fmt: skip
def test_bytes_of_a_run_come_when_they_are_certain(data: bytes, pieces: list[str]) -> None:
    """A later byte may turn them into U+FFFD; they come when no byte can any more."""
    tokenizer = make("gemma")
    ids = [*byte_ids("gemma", data), tokenizer.convert_tokens_to_ids("▁")]
    if pieces[-2] == "a🙂":
        pieces = [*pieces[:-2], "a🙂 ", ""]
    assert stream(tokenizer, ids) == [piece.replace("▁", " ") for piece in pieces]


def test_text_that_looks_like_a_byte_is_no_byte() -> None:
    """A byte-level BPE may have this token; it is neither delayed nor decoded."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<0x41>"])
    assert stream(tokenizer, [len(tokenizer) - 1] * 2) == ["<0x41>", "<0x41>", ""]


def test_clean_up_waits_only_where_it_may_rewrite() -> None:
    """Text that the clean-up cannot change comes at once."""
    tokenizer = make("cleaned bert")
    ids = tokenizer.convert_tokens_to_ids(["do", "n't", "n", "'", "s", ".", "v", "'", "!"])
    assert stream(tokenizer, ids) == ["do", "n't", "", "", " n's", ".", "", "", " v '!", ""]


@pytest.mark.parametrize("name", ["bytes", "merged bytes", "llama", "gemma", "unigram with bytes"])
def test_certain_text_comes_at_once(name: str) -> None:
    """Against all continuations: only U+FFFD may wait without need.

    Several may: a run of bytes that spell U+FFFD has them whether or not it is valid UTF-8.
    """
    tokenizer = make(name)
    ends = [byte_ids(name, bytes(data)) for data in product(b"a\x80\xa0\xbf", repeat=3)]

    @fuzz
    @example(byte_ids(name, "\ufffd\ufffd".encode()), [])
    @given(utf8_lists(name) | id_lists(name, max_size=10), id_lists(name, max_size=2))
    def run(start: list[int], more: list[int]) -> None:
        ids = start + more
        emitted = "".join(stream(tokenizer, ids)[:-1])
        texts = [tokenizer.decode(ids + end, skip_special_tokens=True) for end in ends]
        certain = common_prefix([*texts, tokenizer.decode(ids, skip_special_tokens=True)])
        assert certain[len(emitted) :].strip("\ufffd") == ""
        assert certain.startswith(emitted)

    run()


def test_more_tokens_may_be_pending_than_are_context() -> None:
    """The window must not be cut inside pending text, as after a long run of bytes."""
    tokenizer = make("cleaned unigram")
    quote, a = tokenizer.convert_tokens_to_ids(["'", "a"])
    ids = [a, *byte_ids("cleaned unigram", b" " * 10), quote, a]
    assert stream(tokenizer, ids) == ["a", *[""] * 11, " " * 10 + "'a", ""]


@pytest.mark.parametrize("name", ["cleaned bytes", "cleaned bert", "joined words"])
def test_clean_up_delays_nothing_else(name: str) -> None:
    """Only spaces and the letters of contractions wait."""
    tokenizer = make(name)

    @fuzz
    @given(id_lists(name))
    def run(ids: list[int]) -> None:
        emitted = "".join(stream(tokenizer, ids)[:-1])
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text.startswith(emitted)
        assert text[len(emitted) :] == "\ufffd" or not text[len(emitted) :].strip(" 'nvr")

    run()


# At its cost


class CountingTokenizer:
    """A tokenizer that counts the ids it decodes."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer, self.num_ids = tokenizer, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> Any:
        self.num_ids += len(token_ids)
        return self.tokenizer.decode(token_ids, **options)


LIVE, DEAD = ["<0x41>"], ["<0xFF>"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "cycle_of"),
    [("bytes", b"plain text "), ("bytes", "中🙂".encode()), ("bytes", b"\x80"), ("bytes", b"\xf0"),
     ("merged bytes", "\ufffd".encode()), ("bytes", ["<|eos|>"]), ("unigram", ["\ufffd"]),
     ("llama", ["▁", "<s>"]), ("llama", ["<0xE4>", *["</s>"] * 99]), ("unigram", ["▁"]),
     ("llama", b"aaaaaaaaa\x80"), ("gemma", LIVE), ("gemma", DEAD), ("gemma", LIVE * 9999 + ["▁"]),
     ("gemma", LIVE * 9_999 + DEAD * 10_001), ("gemma", LIVE * 9_999 + DEAD + LIVE * 10_000),
     ("cleaned bytes", b" "), ("cleaned bytes", b"'"), ("cleaned bytes", b"n'"),
     ("cleaned bytes", b"nnnnnnnnnn\x80"), ("cleaned unigram", b" "), ("cleaned unigram", ["▁"]),
     ("cleaned unigram", ["▁", "'", "n"]), ("cleaned bert", ["n", "'"]), ("cleaned bert", ["##n"])],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_cost_is_linear_in_the_length(name: str, cycle_of: bytes | list[str]) -> None:
    """20,000 tokens decode at most 240,000 ids; a window that only grows would take 200 million.

    It could grow by tokens that are skipped, end no character, or leave all text undecided.
    """
    tokenizer = CountingTokenizer(make(name))
    if isinstance(cycle_of, bytes):
        ids = byte_ids(name, cycle_of)
    else:
        ids = tokenizer.convert_tokens_to_ids(cycle_of)
    ids = list(islice(cycle(ids), 20_000))
    pieces = stream(tokenizer, ids)
    assert tokenizer.num_ids <= 12 * len(ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


# The end


def test_nothing_comes_after_finish() -> None:
    """A second `finish` returns nothing, a later `add` is an error."""
    detokenizer = Detokenizer(make("bytes"))
    detokenizer.add(byte_ids("bytes", b"\xe4")[0])
    assert [detokenizer.finish(), detokenizer.finish()] == ["\ufffd", ""]
    with pytest.raises(RuntimeError, match="finished"):
        detokenizer.add(1)


def test_a_decoder_that_looks_back_repeats_no_text() -> None:
    """Text that has come does not come again, even if the decoder looks back at skipped tokens.

    CTC drops repeated tokens, except across its padding, which has no text.
    """
    vocab = {"<pad>": 0, "a": 1, "b": 2, "|": 3}
    backend = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    backend.decoder = decoders.CTC("<pad>", "|", cleanup=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([1, 0, 1, 2]) == "aab"
    assert stream(tokenizer, [1, 0, 1, 2]) == ["a", "", "", "b", ""]
    assert stream(tokenizer, [1, 2, 0, 2]) == ["a", "b", "", "", "b"]
