"""Tokenizers that merge bytes (`tokenizer.ggml.model` is "gpt2"), with their ways to split texts.

A file only names the way. The table has those whose tokenizer.json is known; another is an error.
"""

from dataclasses import dataclass, replace

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from nanovllm.models.gguf import deepseek_ways
from nanovllm.models.gguf.vocabulary import Vocabulary

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"  # a word may have one of these in front


def _words(digits: str) -> str:
    """Words, numbers, other signs, spaces. `digits` matches a number."""
    return rf"{ENDINGS}|{BEFORE}\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{SPACES}"


def _cased_words(digits: str, ending: str) -> str:
    """The same, but a capital letter behind a small one begins a word."""
    ends = rf"{BEFORE}{UPPER}*{LOWER}+{ending}|{BEFORE}{UPPER}+{LOWER}*{ending}"
    return rf"{ends}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{SPACES}"


@dataclass(frozen=True)
class Way:
    """A way to split texts, by patterns one after the other. Without any, as GPT-2 does."""

    patterns: tuple[str, ...] = ()
    single_digits: bool = False  # split before and behind each
    composes: bool = False  # letters and their accents
    whole_tokens: bool = False  # a piece that is a token stays, whatever the merges make of it
    adds_bos: bool = False  # where the file does not say it


LLAMA3 = Way((_words(r"\p{N}{1,3}"),), whole_tokens=True, adds_bos=True)
GPT_4, GPT_4O = Way(LLAMA3.patterns), Way((_cased_words(r"\p{N}{1,3}", f"{ENDINGS}?"),))
QWEN, V3 = Way((_words(r"\p{N}"),)), Way(deepseek_ways.V3)
WAYS = {
    "gpt-2": Way(),
    "smollm": Way(single_digits=True),
    "llama-bpe": LLAMA3, "llama3": LLAMA3, "llama-v3": LLAMA3, "lfm2": LLAMA3,
    "smaug-bpe": replace(GPT_4, whole_tokens=True),
    "dbrx": GPT_4, "glm4": GPT_4, "chatglm-bpe": GPT_4,
    "qwen2": replace(QWEN, composes=True), "deepseek-r1-qwen": replace(QWEN, composes=True),
    "hunyuan": QWEN, "solar-open": QWEN,
    "tekken": Way((_cased_words(r"\p{N}", ""),), whole_tokens=True, adds_bos=True),
    "gpt-4o": GPT_4O, "minimax-m2": GPT_4O,
    "deepseek-llm": Way(deepseek_ways.LLM), "deepseek-coder": Way(deepseek_ways.CODER),
    "deepseek-v3": V3, "hunyuan-dense": V3,
}  # fmt: skip


def byte_level_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a file; one that splits in an unknown way is a ValueError."""
    name = vocabulary.text("pre")
    if name not in WAYS:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not supported; {', '.join(WAYS)} are"
            if name else "tokenizer.ggml.pre is missing, so that the way to split texts is unknown"
        )  # fmt: skip
    way = WAYS[name]
    merges = [_pair(merge) for merge in vocabulary.model.items("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=way.whole_tokens)
    )
    if way.composes:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(way)
    tokenizer.decoder = decoders.ByteLevel()
    vocabulary.add_special_tokens(tokenizer, adds_bos=way.adds_bos)
    return tokenizer


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right or " " in right:
        raise ValueError(f"tokenizer.ggml.merges has {merge!r}, which is no pair of tokens")
    return left, right


def _pre_tokenizer(way: Way) -> pre_tokenizers.PreTokenizer:
    steps: list[pre_tokenizers.PreTokenizer] = []
    if way.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    steps += (
        pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False)
        for pattern in way.patterns
    )
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not way.patterns)
    return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level
