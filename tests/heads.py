"""EAGLE-3 heads: random ones in the published format, and what their definition makes of them.

The definition is that of the paper's own code, of vLLM and of SGLang, which agree: the layer's
input at position j is the embedding of token j + 1 and the fused residuals of position j, rotated
as position j; its residual is the fused one; its output before the last norm is the next input.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

PUBLISHED: dict[str, Any] = dict(
    architectures=["LlamaForCausalLMEagle3"], model_type="llama", num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=80,
    rms_norm_eps=1e-5, rope_theta=10_000.0, hidden_act="silu", tie_word_embeddings=False,
    max_position_embeddings=64, torch_dtype="float32", draft_vocab_size=40, bos_token_id=None,
    eos_token_id=None, pad_token_id=None,
)  # fmt: skip


def make_head(path: Path, model: Path, *, seed: int = 1, own: bool = False, **fields: Any) -> Path:
    """Save a random head for a model, with an embedding of its `own` or without."""
    target = json.loads((model / "config.json").read_text())
    sizes = {name: target[name] for name in ("vocab_size", "hidden_size")}
    config = PUBLISHED | sizes | fields
    torch.manual_seed(seed)
    hidden, inner, dim = (config[n] for n in ("hidden_size", "intermediate_size", "head_dim"))
    heads, kv_heads = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    known, vocab_size = config["draft_vocab_size"], config["vocab_size"]
    shapes = {
        "fc": (hidden, 3 * target["hidden_size"]), "norm": (hidden,), "lm_head": (known, hidden),
        "midlayer.hidden_norm": (hidden,), "midlayer.input_layernorm": (hidden,),
        "midlayer.post_attention_layernorm": (hidden,),
        "midlayer.self_attn.q_proj": (heads, 2 * hidden),
        "midlayer.self_attn.k_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.v_proj": (kv_heads, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, heads),
        "midlayer.mlp.gate_proj": (inner, hidden), "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
    } | ({"embed_tokens": (vocab_size, hidden)} if own else {})  # fmt: skip
    weights = {
        f"{name}.weight": torch.rand(shape) + 0.5 if len(shape) == 1 else torch.randn(shape) * 0.2
        for name, shape in shapes.items()
    }
    if known < vocab_size:
        ids = torch.randperm(vocab_size)[:known].sort().values
        weights["d2t"] = ids - torch.arange(known)
        weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    return path


@torch.inference_mode()
def residuals(model: Path, tokens: list[int], layers: tuple[int, ...]) -> list[torch.Tensor]:
    """The model's residuals [T, hidden] before these layers, from transformers."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(model).float().eval()
    states = loaded(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    return [states[layer][0] for layer in layers]


class Definition:
    """A head in plain PyTorch: no cache, whole sequences, one after the other."""

    def __init__(self, head: Path, model: Path) -> None:
        self.config = json.loads((head / "config.json").read_text())
        self.weights = load_file(head / "model.safetensors")
        if "embed_tokens.weight" not in self.weights:
            loaded: Any = AutoModelForCausalLM.from_pretrained(model)
            table = loaded.get_input_embeddings().weight.detach()
            self.weights["embed_tokens.weight"] = table.float()

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.linear(x, self.weights[f"{name}.weight"].float())

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x * scale * self.weights[f"{name}.weight"].float()

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, heads, D] at positions 0 .. T - 1, as pairs (i, i + D / 2)."""
        dim = x.shape[-1]
        frequencies = self.config["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        angles = torch.outer(torch.arange(len(x)), frequencies)[:, None]
        cos, sin, (a, b) = angles.cos(), angles.sin(), x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def step(self, next_ids: torch.Tensor, states: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The guess after the last position, and the output [T, hidden] that stands for states."""
        dim, length = self.config["head_dim"], len(states)
        embedded = self._norm(
            F.embedding(next_ids, self.weights["embed_tokens.weight"].float()),
            "midlayer.input_layernorm",
        )
        normed = self._norm(states, "midlayer.hidden_norm")
        both = torch.cat([embedded, normed], dim=-1)
        q, k, v = (
            self._linear(both, f"midlayer.self_attn.{n}_proj").view(length, -1, dim) for n in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        future = torch.ones(length, length).triu(1).bool()
        shares = scores.masked_fill(future, -torch.inf).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", shares, v).flatten(1)
        first = normed if self.config.get("norm_before_residual") else states
        states = first + self._linear(attended, "midlayer.self_attn.o_proj")
        normed = self._norm(states, "midlayer.post_attention_layernorm")
        gated = F.silu(self._linear(normed, "midlayer.mlp.gate_proj"))
        inner = gated * self._linear(normed, "midlayer.mlp.up_proj")
        states = states + self._linear(inner, "midlayer.mlp.down_proj")
        token = int(self._linear(self._norm(states[-1], "norm"), "lm_head").argmax())
        return token + int(self.weights["d2t"][token]) if "d2t" in self.weights else token, states

    @torch.inference_mode()
    def drafts(self, tokens: list[int], tapped: list[torch.Tensor], number: int) -> list[int]:
        """Greedy guesses after `tokens`, of which the last one's residuals are not known yet."""
        states = self._linear(torch.cat(tapped, dim=-1)[: len(tokens) - 1], "fc")
        ids = list(tokens[1:])
        drafts: list[int] = []
        while True:
            token, outputs = self.step(torch.tensor(ids), states)
            drafts.append(token)
            if len(drafts) == number:
                return drafts
            ids.append(token)
            states = torch.cat([states, outputs[-1:]])
