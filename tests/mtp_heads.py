"""Draft heads in checkpoints of Qwen3.5, Qwen3-Next and GLM-4.5, and what their definition makes.

The definition is that of vLLM and SGLang, which agree, and for GLM-4.5 that of transformers: the
layer's input at position j joins the normed embedding of token j + 1 and the normed output of the
model at position j, after its last norm; it is rotated as position j; the layer's output after the
head's norm makes logits by the model's projection, and is the next input. The layer itself is
transformers'.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

FILE = "model.safetensors"
# The names of heads that are a layer behind those of the model, and the models with such heads.
LATER = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
         "norm": "shared_head.norm"}  # fmt: skip
LATER_TYPES = ("glm4_moe", "glm4_moe_lite", "deepseek_v3")


@dataclass(frozen=True)
class Spelling:
    """How a family's files name a head, and which layer of the model is of its kind.

    The factors of norms are 1 + weight if there is no `layer` that is the head.
    """

    layer: str | None
    like: int

    @classmethod
    def of(cls, path: Path) -> "Spelling":
        config = json.loads((path / "config.json").read_text())
        number = config.get("num_hidden_layers")
        is_later = config["model_type"] in LATER_TYPES
        return cls(f"model.layers.{number}." if is_later else None, -1 if is_later else 0)

    def there(self, name: str) -> str:
        """The name in files of the head's tensor `name`."""
        if self.layer is None:
            return f"mtp.{name}"
        inside = name.removeprefix("layers.0.")
        stem = name.removesuffix(".weight")
        return self.layer + (f"{LATER[stem]}.weight" if stem in LATER else inside)

    @property
    def factor(self) -> float:
        """What is added to the weights of norms."""
        return 1.0 if self.layer is None else 0.0


def add_head(path: Path, *, seed: int = 1, is_good: bool = False, little: float = 0.005) -> Path:
    """Add a random head to a checkpoint.

    One that `is_good` guesses by the last token alone. All layers, of the model and of the head,
    then add only a `little`, so that about half of its guesses are right.
    """
    weights, spelling = load_file(path / FILE), Spelling.of(path)
    generator = torch.Generator().manual_seed(seed)
    of_layer = sorted(n for n in weights if n.endswith(".self_attn.o_proj.weight"))[spelling.like]
    layer = of_layer.partition("self_attn")[0]
    norm = weights[f"{layer.partition('layers.')[0]}norm.weight"]
    hidden = norm.numel()
    head = {"fc": torch.randn(hidden, 2 * hidden, generator=generator) * 0.2}
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        head[name] = torch.rand(hidden, generator=generator) + 0.5 - spelling.factor
    if is_good:
        head["fc"] = torch.eye(hidden, 2 * hidden) + 0.005 * head["fc"]
        head["norm"] = norm.clone()
        head["pre_fc_norm_embedding"] = torch.ones(hidden) - spelling.factor
    tensors = {spelling.there(f"{name}.weight"): tensor for name, tensor in head.items()}
    for name, tensor in weights.items():
        if name.startswith(layer):
            noise = torch.randn(tensor.shape, generator=generator)
            own = spelling.there(f"layers.0.{name.removeprefix(layer)}")
            tensors[own] = tensor + 0.3 * tensor.std() * noise
    tensors |= weights
    if spelling.layer is not None:  # a copy of the model's own, which nobody reads
        tensors[f"{spelling.layer}embed_tokens.weight"] = torch.zeros(1)
    if is_good:
        for name in tensors:
            if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")):
                tensors[name] = tensors[name] * little
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / FILE)
    return path


class Definition:
    """A model's head, without a cache: whole sequences, one after the other."""

    def __init__(self, path: Path, scratch: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path).float().eval()
        self.weights, self.spelling = load_file(path / FILE), Spelling.of(path)
        layers = enumerate(self.decoder_of(self.model).layers)
        self.index = [i for i, layer in layers if hasattr(layer, "self_attn")][self.spelling.like]
        self.layer = self._layer(path, scratch)

    @staticmethod
    def decoder_of(model: Any) -> Any:
        """The text model of a model that may also see."""
        return getattr(model.model, "language_model", model.model)

    def _layer(self, path: Path, scratch: Path) -> Any:
        """The head's layer: transformers reads it in place of the model's own one."""
        scratch.mkdir()
        (scratch / "config.json").write_bytes((path / "config.json").read_bytes())
        of_layer = next(name for name in self.weights if f".layers.{self.index}." in name)
        own = self.spelling.there("layers.0.")
        there = f"{of_layer.partition('layers.')[0]}layers.{self.index}."
        weights = {
            name: self.weights[own + name.removeprefix(there)] if name.startswith(there) else tensor
            for name, tensor in self.weights.items()
            if not name.startswith(self.spelling.layer or "mtp.")
        }
        save_file(weights, scratch / FILE)
        other: Any = AutoModelForCausalLM.from_pretrained(scratch).float().eval()
        return self.decoder_of(other).layers[self.index]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(
            x.square().mean(-1, keepdim=True) + self.model.config.get_text_config().rms_norm_eps
        )
        weight = self.weights[self.spelling.there(f"{name}.weight")].float()
        return x * scale * (self.spelling.factor + weight)

    def outputs(self, tokens: list[int]) -> torch.Tensor:
        """The model's outputs [T, hidden], after its last norm."""
        states = self.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        output: torch.Tensor = states[-1][0]
        return output

    def step(self, next_ids: list[int], states: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The guess after the last position, and the output [T, hidden] that stands for states."""
        embedded = self.model.get_input_embeddings()(torch.tensor(next_ids))
        both = (
            self._norm(embedded, "pre_fc_norm_embedding"), self._norm(states, "pre_fc_norm_hidden")
        )  # fmt: skip
        weight = self.weights[self.spelling.there("fc.weight")].float()
        x = F.linear(torch.cat(both, dim=-1), weight)[None]
        positions = torch.arange(len(next_ids))[None]
        mask = torch.full((len(next_ids),) * 2, -torch.inf).triu(1)[None, None]
        rope = self.decoder_of(self.model).rotary_emb(x, positions)
        out = self.layer(x, position_embeddings=rope, attention_mask=mask, position_ids=positions)
        out = self._norm((out[0] if isinstance(out, tuple) else out)[0], "norm")
        return int(self.model.lm_head(out[-1]).argmax()), out

    @torch.inference_mode()
    def drafts(self, tokens: list[int], number: int) -> list[int]:
        """Greedy guesses after `tokens`, of which the model has not computed the last one."""
        states, ids, drafts = self.outputs(tokens[:-1]), list(tokens[1:]), list[int]()
        while True:
            token, outputs = self.step(ids, states)
            drafts.append(token)
            if len(drafts) == number:
                return drafts
            ids.append(token)
            states = torch.cat([states, outputs[-1:]])
