"""Vocabulary: reads a model's tokenizer for llguidance, with special tokens kept out of texts."""

import json
from collections.abc import Container
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLTokenizer

# If a mask may allow all tokens of such a kind, llguidance checks them together; it checks other
# tokens one by one. Its own kinds are those of JSON's strings.
LETTERS = ("[a-zA-Z]{1,10}", "[a-zA-Z]+", "[a-z]+")
HIDDEN = "\ufdd0"  # not a character, so no text begins with it


def read_vocabulary(tokenizer: Any, vocab_size: int, eos_token_ids: list[int]) -> "LLTokenizer":
    """Read the tokenizer with as many tokens as the model's masks have, or more if it has more."""
    from llguidance import LLTokenizer

    if tokenizer is None:
        raise ValueError(
            "structured_outputs: there is no text, as the model directory has no tokenizer; pass"
            " tokenizer=... when the engine is made"
        )
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ValueError("structured_outputs need a tokenizer with a tokenizer.json")
    text = json.dumps(described_tokenizer(backend, eos_token_ids))
    num_tokens = 1 + max(tokenizer.get_vocab().values())
    return LLTokenizer(
        text,
        n_vocab=max(vocab_size, num_tokens),
        eos_token=[i for i in eos_token_ids if i < num_tokens] or None,
        slices=[*LLTokenizer.general_slices(), *LETTERS],
    )


def described_tokenizer(backend: Any, eos_token_ids: Container[int] = ()) -> dict[str, Any]:
    """Make a tokenizer.json for llguidance, in which special tokens and EOS tokens are not text.

    Otherwise a text such as "<|im_end|>" in a grammar would match that token. Other added tokens,
    such as Qwen3's "</think>", are text. They become ordinary tokens of the vocabulary, because
    llguidance treats all added tokens in angle brackets as special. If a vocabulary has no room for
    such a token, or a normalizer changes its text, it becomes special, and only its letters are
    text.
    """
    described = json.loads(backend.to_str())
    model, added = described["model"], described["added_tokens"]
    vocab, is_byte_level = model["vocab"], "ByteLevel" in json.dumps(described["decoder"])
    is_list = isinstance(vocab, list)  # by ids
    ids = {text: i for i, (text, _) in enumerate(vocab)} if is_list else dict(vocab)
    names = {}
    for token in added:
        text, token_id = token["content"], token["id"]
        name = _own_name(text, is_byte_level)
        fits = ids.get(name, None if is_list else token_id) == token_id
        fits &= backend.id_to_token(token_id) == text
        if token["special"] or token_id in eos_token_ids or not fits:
            name = HIDDEN + text
        names[text], ids[name] = name, token_id
    if is_list:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    else:
        new = {names[token["content"]]: token["id"] for token in added}
        model["vocab"] = {names.get(text, text): i for text, i in vocab.items()} | new
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    tokens = ({**token, "content": names[token["content"]], "special": True} for token in added)
    special = [token for token in tokens if token["content"].startswith(HIDDEN)]
    return {**described, "added_tokens": special, "truncation": None, "padding": None}


def _own_name(text: str, is_byte_level: bool) -> str:
    """The name that a text has in the vocabulary of a tokenizer's model."""
    if not is_byte_level:
        return text.replace(" ", "\u2581")
    from tokenizers.pre_tokenizers import ByteLevel

    split = ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in split.pre_tokenize_str(text))
