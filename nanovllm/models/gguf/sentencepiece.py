"""Tokenizers of SentencePiece (`tokenizer.ggml.model` is "llama"): pieces with scores, and bytes.

The pair of neighbours whose piece has the highest score is merged first. So the merges of a BPE
model are all pairs that make a piece, in the order of the pieces' scores.
"""

from tokenizers import Tokenizer, decoders, models, normalizers

from nanovllm.models.gguf.vocabulary import NORMAL, Vocabulary

SPACE = "\u2581"  # in pieces
# The special tokens of Phi 3 that leave the spaces behind them.
KEEP_SPACES = ("<unk>", "<s>", "<|endoftext|>")


def sentencepiece_tokenizer(vocabulary: Vocabulary) -> Tokenizer:
    """The tokenizer of a file."""
    adds_space = vocabulary.flag("add_space_prefix", default=True)
    if vocabulary.flag("remove_extra_whitespaces", default=False):
        raise ValueError("tokenizer.ggml.remove_extra_whitespaces is not supported")
    unknown = vocabulary.special("unknown")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary.ids, merges=_merges(vocabulary), byte_fallback=True, fuse_unk=True,
            unk_token=unknown or None,
        )
    )  # fmt: skip
    replace = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = (
        normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if adds_space else replace
    )
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    is_phi3 = vocabulary.model.metadata.get("general.architecture") == "phi3"
    vocabulary.add_special_tokens(
        tokenizer, adds_bos=True, keep_spaces=KEEP_SPACES if is_phi3 else None
    )
    return tokenizer


def _merges(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """All pairs of tokens that make a piece: the highest scores first.

    Of a score, pairs with the longest left token come first, as in transformers' conversions.
    """
    scores = vocabulary.model.items("tokenizer.ggml.scores")
    tokens, ids = vocabulary.tokens, vocabulary.ids
    if len(scores) != len(tokens):
        raise ValueError(f"{len(scores)} tokenizer.ggml.scores for {len(tokens)} tokens")
    pieces = [i for i, kind in enumerate(vocabulary.kinds) if kind == NORMAL]
    if len(pieces) > 1 and len({scores[i] for i in pieces}) == 1:
        raise ValueError("all tokenizer.ggml.scores are equal, so that no merges follow from them")
    found = [
        (-scores[i], -cut, cut - len(token), i, token[:cut], token[cut:])
        for i, token in ((i, tokens[i]) for i in pieces)
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]
