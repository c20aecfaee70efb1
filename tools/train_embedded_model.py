"""Train the tiny Qwen3 model that adds numbers and write it with its tokenizer.

The initial weights and the synthetic sums depend only on a seed. The problems of
`nanovllm.embedded.sample_problems` are never trained on. At the end the weights are rounded to
bfloat16 and evaluated on these problems, alone, after solved problems and in chat form, in float32
and in bfloat16. If an accuracy is below the threshold, or the files together exceed the size limit,
nothing is written and the exit status is 1.

It takes some minutes on two CPU cores::

    python tools/train_embedded_model.py --output nanovllm/embedded
"""

import argparse
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from nanovllm.embedded import EMBEDDED_MODEL
from nanovllm.embedded.problems import sample_problems

ENDOFTEXT, IM_START, IM_END = 256, 257, 258
SPECIAL_TOKENS = {"<|endoftext|>": ENDOFTEXT, "<|im_start|>": IM_START, "<|im_end|>": IM_END}
VOCAB_SIZE = 264
IGNORED = -100
MAX_BYTES = 2_000_000
MAX_CONTEXT_PROBLEMS = 24
# As in Qwen3-0.6B, the heads together are wider than the hidden state. Versions 4 and 5 of
# transformers both read these keys.
MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": IM_END,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 128,
    "initializer_range": 0.02,
    "intermediate_size": 256,
    "max_position_embeddings": 4096,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "pad_token_id": ENDOFTEXT,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
GENERATION_CONFIG = {"eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": ENDOFTEXT}
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

Problem = tuple[int, int]


@dataclass
class Document:
    """Token ids, and for each the token to predict next, or `IGNORED`."""

    tokens: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)

    def add(self, *parts: str | int) -> None:
        """Append text (as bytes) and special tokens that the model need not predict."""
        for part in parts:
            ids = [part] if isinstance(part, int) else list(part.encode())
            self.tokens += ids
            self.labels += [IGNORED] * len(ids)

    def add_answer(self, answer: str, stop: int) -> None:
        """Append an answer that the model has to predict, followed by the token `stop`.

        The stop token is only a label. Each answer within a document is therefore trained as if the
        document ended there, even if the caller appends more.
        """
        ids = list(answer.encode())
        self.labels[-1] = ids[0]
        self.tokens += ids
        self.labels += [*ids[1:], stop]


class ProblemSource:
    """An endless, seeded source of sums that are not held out."""

    def __init__(self, seed: int, held_out: frozenset[Problem]) -> None:
        self.rng = random.Random(seed)
        self._held_out = held_out

    def draw(self) -> Problem:
        """Return one problem; long operands, which are harder, are more frequent."""
        while True:
            problem = (self._draw_number(), self._draw_number())
            if problem not in self._held_out:
                return problem

    def _draw_number(self) -> int:
        choice = self.rng.random()
        if choice < 0.5:
            return self.rng.randrange(100, 1000)
        return self.rng.randrange(10, 100) if choice < 0.8 else self.rng.randrange(10)


def plain_document(source: ProblemSource, problems: int) -> Document:
    """Return solved problems, one per line."""
    document = Document()
    for index in range(problems):
        a, b = source.draw()
        document.add("\n" if index else "", f"{a}+{b}=")
        document.add_answer(str(a + b), ENDOFTEXT)
    return document


def chat_document(source: ProblemSource, turns: int) -> Document:
    """Return a conversation that asks one problem per user turn, sometimes after solved ones."""
    document = Document()
    for index in range(turns):
        solved = source.rng.randrange(8) if source.rng.random() < 0.1 else 0
        context = "".join(f"{a}+{b}={a + b}\n" for a, b in (source.draw() for _ in range(solved)))
        a, b = source.draw()
        if index:
            document.add(IM_END, "\n")
        document.add(IM_START, f"user\n{context}{a}+{b}=", IM_END, "\n", IM_START, "assistant\n")
        document.add_answer(str(a + b), IM_END)
    return document


def collate(documents: Sequence[Document]) -> tuple[Tensor, Tensor]:
    """Stack documents. Padding is on the right, where a causal model does not see it."""
    width = max(len(document.tokens) for document in documents)
    tokens = torch.full((len(documents), width), ENDOFTEXT)
    labels = torch.full((len(documents), width), IGNORED)
    for row, document in enumerate(documents):
        tokens[row, : len(document.tokens)] = torch.tensor(document.tokens)
        labels[row, : len(document.labels)] = torch.tensor(document.labels)
    return tokens, labels


def training_batch(source: ProblemSource, progress: float, curriculum: float) -> list[Document]:
    """Return the documents of one step; `progress` runs from 0 to 1.

    Up to `curriculum` they are short and plain; after that some are long, or conversations.
    """
    choice = source.rng.random()
    if progress < curriculum or choice < 0.3:
        return [plain_document(source, 8) for _ in range(16)]
    if choice < 0.6:
        return [plain_document(source, MAX_CONTEXT_PROBLEMS + 1) for _ in range(6)]
    return [chat_document(source, source.rng.randint(1, 3)) for _ in range(32)]


def build_tokenizer() -> Tokenizer:
    """Return the byte tokenizer: a byte's id is its value, and special tokens follow."""
    vocab = {letter: byte for byte, letter in enumerate(byte_letters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def tokenizer_config() -> dict[str, Any]:
    """Return tokenizer_config.json, with a class that every version of transformers knows."""
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
    return {
        "add_bos_token": False,
        "added_tokens_decoder": {
            str(token_id): {"content": token, **flags, "special": True}
            for token, token_id in SPECIAL_TOKENS.items()
        },
        "bos_token": None,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": "<|im_end|>",
        "model_max_length": MODEL_CONFIG["max_position_embeddings"],
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def byte_letters() -> list[str]:
    """Return the printable letter with which byte-level tokenizers write each byte."""
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    stand_ins = (chr(code) for code in range(0x100, 0x200))
    return [chr(byte) if byte in visible else next(stand_ins) for byte in range(256)]


def supervised_loss(model: Qwen3ForCausalLM, tokens: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy; only supervised positions go through the output layer."""
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state
    wanted = labels != IGNORED
    return cross_entropy(model.lm_head(hidden[wanted]).float(), labels[wanted])


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate at `step`: linear warm-up over 100 steps, then cosine decay to zero."""
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def build_optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers and AdamW for the rest.

    With AdamW alone, learning the sums takes several times as many steps.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and "embed_tokens" not in name
        (matrices if is_matrix else others).append(parameter)
    return [
        torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def train(model: Qwen3ForCausalLM, args: argparse.Namespace, held_out: frozenset[Problem]) -> None:
    """Train in place, and print the loss every 100 steps."""
    source = ProblemSource(args.seed, held_out)
    optimizers = build_optimizers(model)
    model.train()
    start = time.perf_counter()
    average = math.log(VOCAB_SIZE)
    for step in range(args.steps):
        tokens, labels = collate(training_batch(source, step / args.steps, args.curriculum))
        # Bfloat16 is somewhat faster, and the final model must work with its rounding.
        with torch.autocast("cpu", torch.bfloat16):
            loss = supervised_loss(model, tokens, labels)
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args.steps, args.learning_rate)
            optimizer.step()
        average = 0.95 * average + 0.05 * loss.item()
        if step % 100 == 99 or step + 1 == args.steps:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {average:.5f} ({seconds:.0f} s)", flush=True)


def write_model(model: Qwen3ForCausalLM, directory: Path) -> None:
    """Write the checkpoint in bfloat16 and its tokenizer into `directory`."""
    model.to(torch.bfloat16).save_pretrained(directory)
    build_tokenizer().save(str(directory / "tokenizer.json"))
    for name, content in (
        ("config.json", MODEL_CONFIG),
        ("generation_config.json", GENERATION_CONFIG),
        ("tokenizer_config.json", tokenizer_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def evaluation_prompts(tokenizer: Any, seed: int) -> dict[str, list[tuple[list[int], list[int]]]]:
    """Return pairs of prompt tokens and the tokens that must follow, for each form of prompt."""
    problems = sample_problems()
    source = ProblemSource(seed, frozenset())
    forms: dict[str, list[tuple[list[int], list[int]]]] = {"plain": [], "context": [], "chat": []}
    for prompt, answer in problems:
        forms["plain"].append((tokenizer.encode(prompt), [*answer.encode(), ENDOFTEXT]))
    for prompt, answer in problems[:1000]:
        solved = [source.draw() for _ in range(source.rng.randint(0, MAX_CONTEXT_PROBLEMS))]
        context = "".join(f"{a}+{b}={a + b}\n" for a, b in solved)
        ids = tokenizer.encode(context + prompt)
        forms["context"].append((ids, [*answer.encode(), ENDOFTEXT]))
    for prompt, answer in problems[1000:2000]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        forms["chat"].append((tokenizer.encode(text), [*answer.encode(), IM_END]))
    return forms


@torch.inference_mode()
def accuracy(model: Qwen3ForCausalLM, pairs: Sequence[tuple[list[int], list[int]]]) -> float:
    """Return the share of prompts with exactly the expected greedy continuation.

    The expected tokens are the input: greedy decoding generates all of them if and only if each is
    the most likely token after those before it.
    """
    right = 0
    for start in range(0, len(pairs), 50):
        documents = []
        for prompt, expected in pairs[start : start + 50]:
            labels = [IGNORED] * (len(prompt) - 1) + expected
            documents.append(Document(prompt + expected[:-1], labels))
        tokens, targets = collate(documents)
        best = model(input_ids=tokens, use_cache=False).logits.argmax(-1)
        right += int(((best == targets) | (targets == IGNORED)).all(-1).sum())
    return right / len(pairs)


def evaluate(directory: Path, seed: int) -> float:
    """Load the written model, print the accuracies and return the lowest."""
    forms = evaluation_prompts(AutoTokenizer.from_pretrained(directory), seed)
    lowest = 1.0
    for dtype in (torch.float32, torch.bfloat16):
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        for form, pairs in forms.items():
            result = accuracy(model, pairs)
            lowest = min(lowest, result)
            print(f"{dtype} {form}: {result:.2%} of {len(pairs)}", flush=True)
    return lowest


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train the embedded adding model, check it and write it."
    )
    parser.add_argument("--output", type=Path, default=Path(EMBEDDED_MODEL))
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument(
        "--curriculum", type=float, default=0.2, help="share of steps with short, plain documents"
    )
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--min-accuracy", type=float, default=0.995)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Train, evaluate and write; return the exit status."""
    args = parse_arguments(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    held_out = frozenset(
        (int(a), int(b)) for a, b in (prompt[:-1].split("+") for prompt, _ in sample_problems())
    )
    model = Qwen3ForCausalLM(Qwen3Config.from_dict(MODEL_CONFIG)).float()
    print(f"{sum(parameter.numel() for parameter in model.parameters())} parameters", flush=True)
    train(model, args, held_out)
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        write_model(model, directory)
        size = sum(path.stat().st_size for path in directory.iterdir())
        print(f"{size} bytes", flush=True)
        if size > MAX_BYTES:
            print(f"refused: more than {MAX_BYTES} bytes", file=sys.stderr)
            return 1
        lowest = evaluate(directory, args.seed + 1)
        if lowest < args.min_accuracy:
            print(f"refused: {lowest:.2%} is below {args.min_accuracy:.2%}", file=sys.stderr)
            return 1
        args.output.mkdir(parents=True, exist_ok=True)
        for path in directory.iterdir():
            copyfile(path, args.output / path.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
