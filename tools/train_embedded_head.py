"""Train an EAGLE-3 head for the embedded model and write it in the published format.

The model stays as it is. The head learns the model's own distributions after the answers' tokens,
for as many guesses in a row as it is unrolled: each one reads the head's own output where the
model's residuals are not known yet. The problems of `nanovllm.embedded.sample_problems` are never
trained on. At the end the weights are rounded to bfloat16, and the tokens that a step with four
guesses gives on these problems are printed. If they are below the threshold, or the file exceeds
the size limit, nothing is written and the exit status is 1.

It takes some minutes on two CPU cores::

    python tools/train_embedded_head.py --output nanovllm/embedded/head
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from train_embedded_model import (
    ENDOFTEXT,
    IGNORED,
    IM_END,
    IM_START,
    MODEL_CONFIG,
    Document,
    ProblemSource,
    chat_document,
    collate,
    evaluation_prompts,
    learning_rate,
    plain_document,
)
from transformers import AutoTokenizer, Qwen3ForCausalLM

from nanovllm.embedded import EMBEDDED_HEAD, EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

MAX_BYTES = 500_000
NUM_GUESSES = 4
# Before these layers the model's residuals are read. The first is not 1, by which the format would
# mean the outputs of layers.
LAYERS = [3, 2, 1]
TOKENS = sorted([*b"0123456789+=\n", ENDOFTEXT, IM_START, IM_END])
HIDDEN, VOCAB_SIZE = 128, 264
HEAD_CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "attention_bias": False,
    "bos_token_id": None,
    "draft_vocab_size": len(TOKENS),
    "eagle_aux_hidden_state_layer_ids": LAYERS,
    "eos_token_id": IM_END,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "max_position_embeddings": MODEL_CONFIG["max_position_embeddings"],
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": VOCAB_SIZE,
}
HEADS, KV_HEADS, DIM, INNER = 4, 2, 32, 256
KeysAndValues = tuple[Tensor, Tensor]  # [B, heads, T, D] each


class Attention(nn.Module):
    """The head's attention, from an embedding and a state, both normed: [B, T, 2 * hidden]."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * HIDDEN, HEADS * DIM, bias=False)
        self.k_proj = nn.Linear(2 * HIDDEN, KV_HEADS * DIM, bias=False)
        self.v_proj = nn.Linear(2 * HIDDEN, KV_HEADS * DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * DIM, HIDDEN, bias=False)

    def forward(self, x: Tensor, before: list[KeysAndValues]) -> tuple[Tensor, KeysAndValues]:
        """Attend as the guess number len(before) of each position does.

        Of the first guesses it sees those that are that far back, and of each later one that of
        its own chain.
        """
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, DIM).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, dim=1) for y in (rotate(k), v))
        q, number = rotate(q), len(before)
        keys, values = [*before, (k, v)][0]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1 - number)
        scores = [(q @ keys.transpose(2, 3)).masked_fill(hidden, -torch.inf)]
        chain = [*before, (k, v)][1:]
        later = [[shift(y, number - i) for y in both] for i, both in enumerate(chain, 1)]
        scores += [(q * keys).sum(-1, keepdim=True) for keys, _ in later]
        shares = (torch.cat(scores, dim=-1) * DIM**-0.5).softmax(-1)
        attended = shares[..., :length] @ values
        for i, (_, values) in enumerate(later):
            attended = attended + shares[..., length + i, None] * values
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out, (k, v)


def rotate(x: Tensor) -> Tensor:
    """Encode the positions of x [B, heads, T, D]."""
    angles = torch.outer(
        torch.arange(x.shape[2]), 10000.0 ** -(torch.arange(0, DIM, 2, dtype=torch.float32) / DIM)
    )
    cos, sin, (a, b) = angles.cos(), angles.sin(), x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def shift(x: Tensor, number: int) -> Tensor:
    """x [..., T, D] shifted to `number` later positions; zeros at the first ones."""
    return F.pad(x, (0, 0, number, 0))[..., : x.shape[-2], :]


class MLP(nn.Module):
    """The head's gated feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.up_proj = nn.Linear(HIDDEN, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_norm, self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(HIDDEN, eps=1e-6) for _ in range(3)
        )
        self.self_attn = Attention()
        self.mlp = MLP()


class Head(nn.Module):
    """An EAGLE-3 head; its parameters have the published names."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3 * HIDDEN, HIDDEN, bias=False)
        self.midlayer = MidLayer()
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.lm_head = nn.Linear(HIDDEN, len(TOKENS), bias=False)

    def forward(self, embedded: Tensor, residuals: Tensor, number: int) -> list[Tensor]:
        """The logits of `number` successive guesses, each [B, T, tokens].

        At position j the embedding is that of token j + 1, and the logits are of token j + 2. The
        first guess there knows the residuals up to j, the next one those up to j - 1, ...
        """
        layer, states = self.midlayer, self.fc(residuals)
        normed = layer.input_layernorm(embedded)
        before: list[KeysAndValues] = []
        logits = []
        for _ in range(number):
            both = torch.cat([normed, layer.hidden_norm(states)], dim=-1)
            attended, own = layer.self_attn(both, before)
            before.append(own)
            states = states + attended
            states = states + layer.mlp(layer.post_attention_layernorm(states))
            logits.append(self.lm_head(self.norm(states)))
            states = shift(states, 1)
        return logits


class Guesses:
    """A head's guesses for documents, and the model's logits at the same positions."""

    def __init__(self, model: Qwen3ForCausalLM, documents: Sequence[Document]) -> None:
        tokens, labels = collate(documents)
        with torch.no_grad():
            out = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
            self.embedded = model.model.embed_tokens(tokens[:, 1:])
        self.residuals = torch.cat([out.hidden_states[i][:, :-1] for i in LAYERS], dim=-1)
        self.logits = out.logits[:, 1:, TOKENS]
        self.labels = labels[:, 1:]

    def of(self, head: Head, number: int) -> list[Tensor]:
        """The logits of `number` successive guesses."""
        logits: list[Tensor] = head(self.embedded, self.residuals, number)
        return logits


def loss_of(head: Head, guesses: Guesses) -> Tensor:
    """The mean cross entropy of all guesses, where the model has to answer."""
    total = torch.zeros(())
    for number, logits in enumerate(guesses.of(head, NUM_GUESSES)):
        wanted = guesses.labels != IGNORED
        wanted[:, :number] = False
        shares = guesses.logits[wanted].softmax(-1)
        total = total + F.cross_entropy(logits[wanted], shares)
    return total / NUM_GUESSES


def training_batch(source: ProblemSource) -> list[Document]:
    """The documents of one step: most of their tokens are answers, or help to find one."""
    choice = source.rng.random()
    if choice < 0.6:
        return [plain_document(source, 8) for _ in range(16)]
    if choice < 0.8:
        return [plain_document(source, 25) for _ in range(3)]
    return [chat_document(source, source.rng.randint(1, 2)) for _ in range(12)]


def train(
    head: Head, model: Qwen3ForCausalLM, args: argparse.Namespace, source: ProblemSource
) -> None:
    """Train in place, and print the loss every 100 steps."""
    matrices = [p for name, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in name]
    others = [p for name, p in head.named_parameters() if p.ndim == 1 or "lm_head" in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    ]
    start, average = time.perf_counter(), 0.0
    for step in range(args.steps):
        loss = loss_of(head, Guesses(model, training_batch(source)))
        head.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.learning_rate)
            optimizer.step()
        average = loss.item() if step == 0 else 0.95 * average + 0.05 * loss.item()
        if step % 100 == 99 or step + 1 == args.steps:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {average:.4f} ({seconds:.0f} s)", flush=True)


@torch.inference_mode()
def tokens_a_step(
    head: Head, model: Qwen3ForCausalLM, pairs: Sequence[tuple[list[int], list[int]]]
) -> float:
    """How many tokens a decode step gives on average, after the first token of each answer.

    The model is taken to answer as expected; a guess counts if all before it are right.
    """
    num_tokens = num_steps = 0
    for prompt, expected in pairs:
        document = Document(prompt + expected[:-1], [IGNORED] * (len(prompt) - 1) + expected)
        guesses = Guesses(model, [document])
        right = [
            torch.tensor(TOKENS)[logits[0].argmax(-1)] == guesses.labels[0]
            for logits in guesses.of(head, NUM_GUESSES)
        ]
        last = len(prompt)  # the index of the last known token
        while last < len(prompt) + len(expected) - 1:
            left = len(prompt) + len(expected) - 1 - last
            accepted = 0
            while accepted < min(NUM_GUESSES, left) and right[accepted][last - 1 + accepted]:
                accepted += 1
            step = min(accepted + 1, left)
            last, num_tokens, num_steps = last + step, num_tokens + step, num_steps + 1
    return num_tokens / num_steps


def weights_of(head: Head) -> dict[str, Tensor]:
    """The tensors as they are published."""
    ids = torch.tensor(TOKENS)
    known = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    weights = {name: tensor.bfloat16() for name, tensor in head.state_dict().items()}
    return weights | {"d2t": ids - torch.arange(len(TOKENS)), "t2d": known}


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a head for the embedded model, check it and write it."
    )
    parser.add_argument("--output", type=Path, default=Path(EMBEDDED_HEAD))
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--min-tokens", type=float, default=1.8, help="a step, in each form")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and write; return the exit status."""
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    held_out = frozenset(
        (int(a), int(b)) for a, b in (prompt[:-1].split("+") for prompt, _ in sample_problems())
    )
    model = Qwen3ForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32).eval()
    head = Head()
    print(f"{sum(parameter.numel() for parameter in head.parameters())} parameters", flush=True)
    train(head, model, args, ProblemSource(args.seed, held_out))
    weights = weights_of(head)
    head.load_state_dict({name: weights[name].float() for name in head.state_dict()})
    forms = evaluation_prompts(AutoTokenizer.from_pretrained(EMBEDDED_MODEL), args.seed + 1)
    for form, pairs in forms.items():
        tokens = tokens_a_step(head, model, pairs)
        print(f"{form}: {tokens:.2f} tokens a step, on {len(pairs)} problems", flush=True)
        if tokens < args.min_tokens:
            print(f"refused: less than {args.min_tokens}", file=sys.stderr)
            return 1
    size = sum(tensor.nbytes for tensor in weights.values())
    if size > MAX_BYTES:
        print(f"refused: {size} bytes are more than {MAX_BYTES}", file=sys.stderr)
        return 1
    args.output.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.output / "model.safetensors", metadata={"format": "pt"})
    config = json.dumps(HEAD_CONFIG, indent=2) + "\n"
    (args.output / "config.json").write_text(config, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
