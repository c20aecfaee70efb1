"""Tokenizers of GGUF files: their ids and texts are those of the tokenizers they were made from."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from conftest import make_model
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, write_gguf
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from nanovllm import LLM
from nanovllm.engine.requests.other_tokenizers import is_plain
from nanovllm.engine.requests.tokenizer import load_tokenizer
from nanovllm.models.gguf.byte_level import WAYS, _pre_tokenizer
from nanovllm.models.gguf.directory import gguf_directory
from nanovllm.models.gguf.split import open_gguf

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's 12345 o'clock, they'll say; I'VE 2 of 300.",
    "def f(x):\n    return x ** 2  # so\n\n\n\tif x:\n        pass\r\n", "ÀÉÎõü straße naïve Ωμέγα",
    "你好\uff0c世界。这是一个测试。", "こんにちは世界 안녕하세요",
    "🙂👍🏽 emoji, \u200d zero width", "camelCaseWords HTTPServer",
] * 3  # fmt: skip
WORD_LIST = [word for text in CORPUS for word in re.findall(r" ?\w+", text)] * 9
TEXTS = [
    *CORPUS[:7], "", " ", "  a", "a  ", "\n", " \n \n\n x", "a\u00a0b", "e\u0301 \u0041\u030a",
    "1234567890 12 3", "it's IT'S 'tis don'T", "".join(map(chr, range(256))), "a/b//c\n/d", "\t\tx",
    "<|im_start|>user\nHi <|im_end|>\n", "x<|endoftext|><|im_end|>y", "<tool> a</tool>",
    "a <tool>b", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \ufffd", "Ⅷ ²³ ١٢٣",
    "\u3000全角", "ﬁ ǆ Ǆ", "</s>",
]  # fmt: skip

# The patterns as published tokenizer.json files have them.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?"
    r"[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# By the names in files: the pattern, whether BOS is added, and whether merges are skipped.
BYTE_LEVEL: dict[str, tuple[str, bool]] = {
    "gpt-2": ("", False),
    "smollm": ("", False),
    "qwen2": (WORDS.replace("DIGITS", r"\p{N}"), False),
    "llama-bpe": (WORDS.replace("DIGITS", r"\p{N}{1,3}"), True),
    "tekken": (TEKKEN, True),
    "gpt-4o": (GPT_4O, False),
    "minimax-m2": (GPT_4O, False),
    "glm4": (WORDS.replace("DIGITS", r"\p{N}{1,3}"), False),
    "hunyuan": (WORDS.replace("DIGITS", r"\p{N}"), False),
}
# What the patterns of DeepSeek's files make of texts, by hand: pieces between bars.
PIECES_OF: dict[str, list[str]] = {
    "deepseek-llm": [
        "It|'|s| |12345| o|'|clock|,| they|'|ll", "x| =| |1|\n|\n|y|\t\t",
        " \u0561\u0562|\u0531| \u00e9|t|\u00e9", "你好|\uff0c|世界|!?|。", "²³|\u01c0\U0001d400",
    ],
    "deepseek-coder": [
        "It|'|s| |1|2| o|'|clock", "x| = |1|\n|\n|y", "\u0561\u0562\u0531| \u00e9t\u00e9",
        "你好|\uff0c|世界|!?", "a| **| b",
    ],
    "deepseek-v3": [
        "It|'s| |123|45| o|'clock|,| they|'ll", "x| =| |1|\n\n|y|  | z|(a|)",
        "你好|\uff0c|世界です|!?。", "e\u0301te\u0301| **| b|\r\n", "_name|.f| a", "naïve|…“|x|”",
    ],
}  # fmt: skip


def byte_level(pre: str) -> Tokenizer:
    """A small tokenizer that splits by the pattern."""
    pattern, adds_bos = BYTE_LEVEL[pre]
    tokenizer = Tokenizer(models.BPE(ignore_merges=adds_bos))
    steps: list[Any] = []
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    if pre == "smollm":
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pattern:
        steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern))
    # It has tokens across the pattern's pieces, and some that no merges make.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=640, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*CORPUS, *WORD_LIST], trainer)
    raw = json.loads(tokenizer.to_str())
    del raw["model"]["merges"][60::7]
    tokenizer = Tokenizer.from_str(json.dumps(raw))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("</tool>")])
    if adds_bos:
        bos = SPECIAL[0]
        tokenizer.post_processor = processors.TemplateProcessing(
            f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOVLLM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a vocabulary that is larger than those of the tokenizers."""
    fields = dict(vocab_size=1024, num_hidden_layers=1, hidden_size=32)
    path = make_model(tmp_path_factory.mktemp("model"), family="Llama", **fields)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).unlink()
    return path


def loaded(model: Path, path: Path, metadata: dict[str, Any]) -> Any:
    """The tokenizer of a GGUF file with these keys."""
    write_gguf(model, path, changes=metadata)
    return load_tokenizer(None, gguf_directory(path))


def with_tokenizer(model: Path, path: Path, tokenizer: Tokenizer) -> Path:
    """A copy of the model's directory, by links, with a tokenizer."""
    path.mkdir()
    for file in model.iterdir():
        (path / file.name).symlink_to(file)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[0], eos_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)  # fmt: skip
    return path


@pytest.mark.parametrize("pre", BYTE_LEVEL)
def test_a_tokenizer_of_bytes_is_the_original(model: Path, tmp_path: Path, pre: str) -> None:
    """A wrong pattern, lost special tokens, or BOS twice or not at all."""
    original = byte_level(pre)
    directory = with_tokenizer(model, tmp_path / "m", original)
    changes = {"tokenizer.ggml.add_bos_token": BYTE_LEVEL[pre][1]}
    write_gguf(directory, tmp_path / "m.gguf", pre=pre, changes=changes)
    found = load_tokenizer(None, gguf_directory(tmp_path / "m.gguf"))
    assert len(found) == original.get_vocab_size()
    for text in TEXTS:
        ids = original.encode(text).ids
        assert found(text)["input_ids"] == ids, text
        for keeps in (True, False):
            expected = original.decode(ids, skip_special_tokens=not keeps)
            assert found.decode(ids, skip_special_tokens=not keeps) == expected
    for i in range(len(found)):  # each byte, too
        assert found.decode([i]) == original.decode([i], skip_special_tokens=False)
    assert found.bos_token == SPECIAL[0] and found.eos_token == SPECIAL[2]
    assert {*found.all_special_tokens} >= {SPECIAL[0], SPECIAL[2]}


@pytest.mark.parametrize("pre", PIECES_OF)
def test_texts_are_split_by_several_patterns(pre: str) -> None:
    """Each splits the pieces of those before it: signs of DeepSeek LLM have ASCII's letters, too.

    HunYuan's dense models split as DeepSeek V3.
    """
    decoder = decoders.ByteLevel()
    for text in PIECES_OF[pre]:
        split = _pre_tokenizer(WAYS[pre]).pre_tokenize_str(text.replace("|", ""))
        assert "|".join(decoder.decode([piece]) for piece, _ in split) == text
    assert WAYS["hunyuan-dense"] == WAYS["deepseek-v3"]


PIECES = re.compile(r"(<s>|</s>)")


def sentencepiece() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds of a small vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=500, show_progress=False))
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    letters = [text for text, _ in vocabulary if len(text) == 1]
    pieces = [text for text, _ in vocabulary if len(text) > 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *pieces, *letters]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces) + len(letters))]
    kinds = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 259)
    return tokens, scores, kinds


def encode(text: str, tokens: list[str], scores: list[float], prefix: str) -> list[int]:
    """SentencePiece's rule: merge the neighbours whose piece has the highest score, the first."""
    ids = {token: i for i, token in enumerate(tokens)}
    found = [1]
    for part in filter(None, PIECES.split(text)):
        if PIECES.fullmatch(part):
            found.append(ids[part])
            continue
        parts = [*(prefix + part).replace(" ", "▁")]
        while True:
            pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts))
                     if a + b in ids]  # fmt: skip
            if not pairs:
                break
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        for piece in parts:
            found += [ids[piece]] if piece in ids else [3 + byte for byte in piece.encode()]
    return found


@pytest.mark.parametrize("prefix", ["▁", ""])
def test_a_tokenizer_of_sentencepiece(model: Path, tmp_path: Path, prefix: str) -> None:
    """Merges in another order than the scores', no bytes for unknown letters, a space too many."""
    tokens, scores, kinds = sentencepiece()
    metadata = {
        "model": "llama", "tokens": tokens, "scores": scores, "token_type": kinds,
        "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
        "add_space_prefix": bool(prefix),
    }  # fmt: skip
    metadata = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    found = loaded(model, tmp_path / "m.gguf", metadata)
    for text in [*TEXTS, "a<s>b</s> c"]:
        ids = found(text)["input_ids"]
        assert ids == encode(text, tokens, scores, prefix), text
        if "s>" not in text:
            assert found.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_of_phi_3_swallow_spaces(tmp_path: Path) -> None:
    """The files do not say it, but templates have line ends behind these tokens."""
    path = make_model(tmp_path, family="Phi3", vocab_size=1024, num_hidden_layers=1, pad_token_id=0)
    tokens, scores, kinds = sentencepiece()
    last = len(tokens)
    tokens, scores = [*tokens, "<|end|>", "<|endoftext|>"], [*scores, 0.0, 0.0]
    metadata = {"model": "llama", "tokens": tokens, "scores": scores,
                "token_type": [*kinds, CONTROL, CONTROL], "add_bos_token": False}  # fmt: skip
    changes = {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}
    found = loaded(path, tmp_path / "m.gguf", changes)
    assert found("<|end|>\n<|endoftext|>")["input_ids"] == [last, last + 1]
    assert len(found("<|endoftext|>\n")["input_ids"]) > 1


def test_tokens_that_fill_the_table_are_left_out(model: Path, tmp_path: Path) -> None:
    """They are in no text: the original does not have them."""
    directory = with_tokenizer(model, tmp_path / "m", byte_level("gpt-2"))
    write_gguf(directory, tmp_path / "m.gguf")
    keys = [f"tokenizer.ggml.{name}" for name in ("tokens", "token_type")]
    tokens, kinds = (open_gguf(tmp_path / "m.gguf").items(key) for key in keys)
    changes = dict(zip(keys, ([*tokens, "[PAD]"], [*kinds, 5]), strict=True))
    found = loaded(directory, tmp_path / "padded.gguf", changes)
    assert len(found) == len(tokens) and len(found("[PAD]")["input_ids"]) > 1


def test_chat_templates(model: Path, tmp_path: Path) -> None:
    """One template, or several by name."""
    directory = with_tokenizer(model, tmp_path / "m", byte_level("gpt-2"))
    template = "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}]
    changes = {"tokenizer.chat_template": template}
    write_gguf(directory, tmp_path / "one.gguf", changes=changes)
    found = load_tokenizer(None, gguf_directory(tmp_path / "one.gguf"))
    assert found.apply_chat_template(messages, tokenize=False) == "<|im_start|>Hi"
    changes |= {
        "tokenizer.chat_template.tool_use": "tools",
        "tokenizer.chat_templates": ["tool_use"],
    }
    write_gguf(directory, tmp_path / "two.gguf", changes=changes)
    found = load_tokenizer(None, gguf_directory(tmp_path / "two.gguf"))
    assert found.apply_chat_template(messages, tokenize=False) == "<|im_start|>Hi"
    assert found.apply_chat_template(messages, chat_template="tool_use", tokenize=False) == "tools"


def test_all_tokens_that_end_an_answer_are_known(model: Path, tmp_path: Path) -> None:
    """A chat model whose file names only one of them would write on behind the other."""
    directory = with_tokenizer(model, tmp_path / "m", byte_level("gpt-2"))
    write_gguf(directory, tmp_path / "m.gguf", changes={"tokenizer.ggml.eot_token_id": 7})
    made = gguf_directory(tmp_path / "m.gguf")
    tokenizer = load_tokenizer(None, made)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    fields = json.loads((made / "generation_config.json").read_text())
    assert fields["eos_token_id"] == [ends[0], 7, ends[1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pre": "default"}, "tokenizer.ggml.pre 'default' is not supported"),
        ({"pre": None}, "tokenizer.ggml.pre is missing"),
        ({"model": "t5"}, "tokenizer.ggml.model must be gpt2 or llama, got 't5'"),
        ({"merges": ["a b c"]}, "merges has 'a b c', which is no pair"),
        ({"merges": ["a ab"]}, "not supported"),
        ({"bos_token_id": 7000, "add_bos_token": True}, "bos_token_id is 7000, of 259 tokens"),
        ({"model": "llama", "scores": [0.0]}, "1 tokenizer.ggml.scores for 259 tokens"),
        ({"model": "llama", "scores": [0.0] * 259}, "scores are equal"),
    ],
)
def test_an_unsupported_tokenizer_names_the_way_out(
    model_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    """Another tokenizer can still be given."""
    keys = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    write_gguf(model_dir, tmp_path / "m.gguf", changes=keys)
    with pytest.raises(OSError, match=r"tokenizer=\.\.\. names a directory") as caught:
        LLM(str(tmp_path / "m.gguf"))
    assert message in str(caught.value)
    assert load_tokenizer(str(model_dir), gguf_directory(tmp_path / "m.gguf")) is not None


def test_tokenizer_files_of_another_class_are_no_plain_ones(model: Path, tmp_path: Path) -> None:
    """A directory with a GGUF file may have them: AutoTokenizer knows their class."""
    directory = with_tokenizer(model, tmp_path / "m", byte_level("gpt-2"))
    write_gguf(directory, tmp_path / "m.gguf")
    made = gguf_directory(tmp_path / "m.gguf")
    assert is_plain(made)
    (made / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    assert not is_plain(made)


def test_a_file_without_a_tokenizer(model: Path, tmp_path: Path, caplog: Any) -> None:
    write_gguf(model, tmp_path / "m.gguf")
    assert load_tokenizer(None, gguf_directory(tmp_path / "m.gguf")) is None
    assert "tokenizer=... names another directory" in caplog.text
