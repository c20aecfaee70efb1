"""Vocabulary: the tokens of a GGUF file, their kinds, and which ones are special."""

from collections.abc import Collection
from functools import cached_property

from tokenizers import AddedToken, Tokenizer, processors

from nanovllm.models.gguf.split import GGUFModel
from nanovllm.utils.checks import shorten

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of tokens
PREFIX = "tokenizer.ggml."
# Control tokens that end an answer in every model that has them. Files name one or two of them.
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<|eom_id|>",
    "<end_of_turn>", "<|end_of_turn|>",
)  # fmt: skip
# In models that have the first two, an answer has several messages: <|end|> ends only one of them.
ENDS_OF_MESSAGES = ("<|return|>", "<|call|>", "<|endoftext|>")


class Vocabulary:
    """The tokens of a model by their ids."""

    def __init__(self, model: GGUFModel) -> None:
        self.model = model
        self.tokens: list[str] = model.items(f"{PREFIX}tokens")
        self.kinds: list[int] = model.items(f"{PREFIX}token_type") or [NORMAL] * len(self.tokens)
        if len(self.kinds) != len(self.tokens):
            raise ValueError(f"{len(self.kinds)} {PREFIX}token_type for {len(self.tokens)} tokens")
        if not all(isinstance(token, str) for token in self.tokens):
            raise ValueError(f"{PREFIX}tokens must be texts, got {shorten(self.tokens[:3])}")

    @cached_property
    def ids(self) -> dict[str, int]:
        """The ids of the tokens, without those that only fill the table of embeddings."""
        kinds = enumerate(self.kinds)
        return {self.tokens[i]: i for i, kind in kinds if kind != UNUSED}

    def text(self, key: str) -> str:
        """The text of a key; empty if there is none."""
        value = self.model.metadata.get(PREFIX + key, "")
        if not isinstance(value, str):
            raise ValueError(f"{PREFIX}{key} must be a text, got {shorten(value)}")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """The truth value of a key."""
        value = self.model.metadata.get(PREFIX + key, default)
        if not isinstance(value, bool):
            raise ValueError(f"{PREFIX}{key} must be true or false, got {shorten(value)}")
        return value

    def special(self, name: str) -> str:
        """The special token of a name, such as "bos"; empty if there is none."""
        index = self.model.metadata.get(f"{PREFIX}{name}_token_id")
        if index is None:
            return ""
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise ValueError(
                f"{PREFIX}{name}_token_id is {shorten(index)}, of {len(self.tokens)} tokens"
            )
        return self.tokens[index]

    @property
    def end_ids(self) -> list[int]:
        """The ids of the tokens that end an answer, the file's EOS first."""
        named = [self.special(name) for name in ("eos", "eot", "eom")]
        kinds, ids = self.kinds, self.ids
        ends = ENDS_OF_MESSAGES if {*ENDS_OF_MESSAGES[:2]} <= ids.keys() else ENDS
        known = [text for text in ends if text in ids and kinds[ids[text]] == CONTROL]
        return [*dict.fromkeys(ids[text] for text in (*named, *known) if text in ids)]

    def add_special_tokens(
        self, tokenizer: Tokenizer, *, adds_bos: bool, keep_spaces: Collection[str] | None = None
    ) -> None:
        """Add the tokens that are found in texts before these are split, and those at the ends.

        With `keep_spaces`, the control tokens except these swallow the spaces behind them.
        """
        for control in (True, False):
            kind = CONTROL if control else USER_DEFINED
            added = [
                AddedToken(
                    token, normalized=False,
                    rstrip=control and keep_spaces is not None and token not in keep_spaces,
                )
                for token, i in self.ids.items()
                if token and (self.kinds[i] == kind or (control and self.kinds[i] == UNKNOWN))
            ]  # fmt: skip
            add = tokenizer.add_special_tokens if control else tokenizer.add_tokens
            add(added)
        self._add_ends(tokenizer, adds_bos)

    def _add_ends(self, tokenizer: Tokenizer, adds_bos: bool) -> None:
        """Let encoding add BOS and EOS where the file, or else the tokenizer's kind, wants it."""
        bos, eos = (
            self.special(name) if self.flag(f"add_{name}_token", default=default) else ""
            for name, default in (("bos", adds_bos), ("eos", False))
        )
        if ends := [token for token in (bos, eos) if token]:
            template = [f"{bos}:0"] * bool(bos) + ["$A:0"] + [f"{eos}:0"] * bool(eos)
            pair = [*template, *(part.replace(":0", ":1").replace("$A", "$B") for part in template)]
            tokenizer.post_processor = processors.TemplateProcessing(
                single=template, pair=pair, special_tokens=[(t, self.ids[t]) for t in ends]
            )
