"""Metadata: the keys of a model's architecture, which notes those that were read.

What nobody has read may change the computation, so that `refuse_unread` refuses it.
"""

from collections.abc import Container
from typing import Any

from nanovllm.models.gguf.hybrid_names import HYBRID_LAYERS
from nanovllm.models.gguf.reader import Array
from nanovllm.models.gguf.split import GGUFModel
from nanovllm.utils.checks import shorten

# The keys of general.architecture that are supported, with the names of transformers' classes.
ARCHITECTURES = {
    "llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM", "phi3": "Phi3ForCausalLM", "smollm3": "SmolLM3ForCausalLM",
    "qwen2moe": "Qwen2MoeForCausalLM", "olmoe": "OlmoeForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM", "phimoe": "PhimoeForCausalLM",
    "olmo2": "Olmo2ForCausalLM", "granite": "GraniteForCausalLM", "seed_oss": "SeedOssForCausalLM",
    "exaone4": "Exaone4ForCausalLM", "ernie4_5": "Ernie4_5ForCausalLM", "glm4": "Glm4ForCausalLM",
    "hunyuan-dense": "HunYuanDenseV1ForCausalLM", "command-r": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "gptneox": "GPTNeoXForCausalLM", "gpt2": "GPT2LMHeadModel", "phi2": "PhiForCausalLM",
    "stablelm": "StableLmForCausalLM", "starcoder2": "Starcoder2ForCausalLM",
    "nemotron": "NemotronForCausalLM", "falcon": "FalconForCausalLM", "arcee": "ArceeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "gpt-oss": "GptOssForCausalLM", "gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "lfm2": "Lfm2ForCausalLM", "lfm2moe": "Lfm2MoeForCausalLM", "mamba2": "Mamba2ForCausalLM",
    "granitehybrid": "GraniteMoeHybridForCausalLM", "falcon-h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM", "nemotron_h_moe": "NemotronHForCausalLM",
    "qwen35": "Qwen3_5ForCausalLM", "qwen35moe": "Qwen3_5MoeForCausalLM",
    "deepseek2": "DeepseekV2ForCausalLM",  # or another one with latents
    "minicpm3": "MiniCPM3ForCausalLM",
    # Qwen3-Next computes the same as this, and its GGUF files have tensors that are as split.
    "qwen3next": "Qwen3_5MoeForCausalLM",
    # Solar Open, too, which differs in the sizes alone.
    "glm4moe": "Glm4MoeForCausalLM", "ernie4_5-moe": "Ernie4_5_MoeForCausalLM",
    "hunyuan-moe": "HunYuanMoEV1ForCausalLM", "dots1": "Dots1ForCausalLM",
    "minimax-m2": "MiniMaxM2ForCausalLM", "afmoe": "AfmoeForCausalLM",
    "mimo2": "MiMoV2FlashForCausalLM",
}  # fmt: skip
WITH_DRAFTS = ("glm4moe", "mimo2")  # and hybrids: files may have layers that predict later tokens
UNEQUAL_HEADS = ("mimo2",)  # layers differ in their key heads, and values are shorter than keys
REQUIRED = object()
# Of these, hybrid models have 0 in layers of another kind.
OF_SOME_LAYERS = ("attention.head_count", "attention.head_count_kv", "feed_forward_length")


class Metadata:
    """The values of a model's metadata, by the part of their keys behind the architecture."""

    def __init__(self, model: GGUFModel) -> None:
        """Raise a ValueError unless the file has a model of a known architecture."""
        self.model = model
        self._raw = model.metadata
        self._read: set[str] = set()
        kind = self._raw.get("general.type", "model")
        name = self._raw.get("general.architecture")
        if kind != "model":
            raise ValueError(f"general.type must be model, got {shorten(kind)}")
        if name not in ARCHITECTURES:
            raise ValueError(
                f"general.architecture {shorten(name)} is not supported; {', '.join(ARCHITECTURES)}"
                " are"
            )
        self.architecture: str = name

    def get(self, key: str, default: Any = REQUIRED) -> Any:
        """The value of a key; one that must be there is a ValueError if it is not.

        Of an array with a number for each layer, the number, if all layers have the same.
        """
        self._read.add(key)
        value = self._raw.get(full := f"{self.architecture}.{key}")
        if isinstance(value, Array):
            values = {*value.values()}
            if key in OF_SOME_LAYERS and self.architecture in HYBRID_LAYERS:
                values = values - {0} or values
            if len(values) != 1:
                raise ValueError(
                    f"layers with different {full} {shorten([*values])} are not supported"
                )
            (value,) = values
        if value is None and default is REQUIRED:
            raise ValueError(f"the metadata have no key {full}")
        return default if value is None else value

    def ignore(self, *keys: str) -> None:
        """These keys may have any value: it changes nothing that is computed here."""
        self._read.update(keys)

    def of_layers(self, key: str) -> list[float]:
        """The numbers of all layers; a ValueError unless there is one for each."""
        self._read.add(key)
        value, count = self._raw.get(f"{self.architecture}.{key}"), self.size("block_count")
        numbers: list[Any] = value.values() if isinstance(value, Array) else []
        if len(numbers) != count or not all(type(number) is float for number in numbers):
            raise self.wrong(key, numbers or value, f"a list of {count} numbers")
        return numbers

    def of_each(self, key: str) -> list[int]:
        """The whole numbers of all layers, from an array or from one number for all."""
        self._read.add(key)
        value, count = self._raw.get(f"{self.architecture}.{key}"), self.size("block_count")
        numbers: list[Any] = value.values() if isinstance(value, Array) else [value] * count
        if len(numbers) != count or not all(type(each) is int and each >= 0 for each in numbers):
            raise self.wrong(key, value, f"a whole number, or a list of {count} of them")
        return numbers

    def flags(self, key: str) -> list[bool] | None:
        """The value of a key for each layer, or None; a ValueError unless it is an array."""
        self._read.add(key)
        value = self._raw.get(f"{self.architecture}.{key}")
        if value is None:
            return None
        layers = self.size("block_count")
        values = [*value.values()] if isinstance(value, Array) else []
        if len(values) != layers or not all(type(each) is bool for each in values):
            raise self.wrong(key, value, f"{layers} times true or false")
        return values

    def size(self, key: str, default: Any = REQUIRED) -> Any:
        """A whole number of at least 1, or the default."""
        value = self.get(key, default)
        if value is not default and (type(value) is not int or value < 1):
            raise self.wrong(key, value, "a whole number of at least 1")
        return value

    def number(self, key: str, default: Any = REQUIRED) -> Any:
        """A number above 0, or the default."""
        value = self.get(key, default)
        if value is not default and (type(value) not in (int, float) or not 0 < value < 1e30):
            raise self.wrong(key, value, "a number above 0")
        return value

    def only(self, key: str, allowed: Container[Any]) -> None:
        """Raise a ValueError if a key has a value that is not allowed: we do not compute it."""
        value = self.get(key, None)
        if value is not None and value not in allowed:
            raise self.wrong(key, value, f"one of {allowed}")

    def number_of_heads(self, key: str = "head_count") -> int:
        """The heads of queries, or of keys and values: they may be as many."""
        if self.architecture in HYBRID_LAYERS and not self.get("attention.head_count", 0):
            return 1  # there is no attention
        heads = self.size("attention.head_count")
        return int(heads if key == "head_count" else self.size(f"attention.{key}", heads))

    @property
    def num_layers(self) -> int:
        """The layers without those that only predict later tokens, at the end."""
        may_have = self.architecture in (*HYBRID_LAYERS, *WITH_DRAFTS)
        drafts: int = self.get("nextn_predict_layers", 0) if may_have else 0
        return int(self.size("block_count")) - drafts

    def wrong(self, key: str, value: Any, needed: str) -> ValueError:
        """The error for a value that is not supported."""
        return ValueError(f"{self.architecture}.{key} must be {needed}, got {shorten(value)}")

    def refuse_unread(self) -> None:
        """Raise a ValueError that names the keys of the architecture that nobody has read."""
        prefix = f"{self.architecture}."
        keys = (key for key in self._raw if key.startswith(prefix))
        if unread := [key for key in keys if key.removeprefix(prefix) not in self._read]:
            raise ValueError(
                f"the metadata {', '.join(map(shorten, unread[:5]))} may change the computation and"
                " is not supported"
            )
