"""Random latent rows in a paged cache, and attention to them by its definition in float64.

Memory that belongs to no sequence is NaN, so that every read of it is found.
"""

import itertools
from dataclasses import dataclass

import torch

from nanovllm.kernels.kv_layer import KVLayer

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Shape:
    """A batch: the last `queries` tokens of each context, or `num_queries` rows of a decode step.

    A decode step's last tokens use as many of a context's rows as `used` says.
    """

    contexts: list[int]
    queries: list[int] | None = None
    heads: int = 3
    rank: int = 40
    rotated: int = 8
    block_size: int = 16
    dtype: torch.dtype = FP32
    num_queries: int = 1
    used: list[int] | None = None  # all, or as many as the context has tokens
    programs: int = 7
    window: int | None = None
    all_values: bool = False  # a whole row is the value

    @property
    def width(self) -> int:
        return self.rank + self.rotated

    @property
    def value_width(self) -> int:
        return self.width if self.all_values else self.rank

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.heads, self.width, self.value_width

    @property
    def lens(self) -> list[int]:
        """The keys that each token sees; 0 for unused rows of a decode step."""
        if self.queries:
            pairs = zip(self.contexts, self.queries, strict=True)
            return [n - new + 1 + i for n, new in pairs for i in range(new)]
        lens = []
        for index, n in enumerate(self.contexts):
            used = min(n, self.num_queries if self.used is None else self.used[index])
            lens += [n - used + 1 + i if i < used else 0 for i in range(self.num_queries)]
        return lens


class Latents:
    """The tensors of a shape: strided queries, a cache with blocks in random order."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(len(shape.contexts) + shape.width)
        self.shape, size = shape, shape.block_size
        counts = [-(-n // size) for n in shape.contexts]
        order = torch.randperm(sum(counts) + 2).int()
        self.tables = order[-1].repeat(len(counts), max(counts) + 2)
        cache = torch.full((len(order), size, 1, shape.width), torch.nan, dtype=shape.dtype)
        self.asking = shape.queries or [shape.num_queries] * len(counts)
        q = torch.randn(sum(self.asking), shape.heads + 1, shape.width)
        q *= torch.tensor([0.1, 1.0, 3.0])[torch.randint(3, (len(q), 1, 1))]
        self.rows = []
        blocks = order[:-2].split(counts)
        for index, (n, of_seq) in enumerate(zip(shape.contexts, blocks, strict=True)):
            self.tables[index, : len(of_seq)] = of_seq
            slots = (of_seq[:, None].long() * size + torch.arange(size)).flatten()[:n]
            self.rows.append(torch.randn(n, shape.width).to(shape.dtype))
            cache.flatten(0, 1)[slots, 0] = self.rows[-1]
        self.q = q.to(shape.dtype).to(device)[:, :-1]
        self.tables, self.cache = self.tables.to(device), cache.to(device)
        self.lens = torch.tensor(shape.lens, dtype=torch.int32, device=device)
        self.cu_q, self.cu_k = (
            torch.tensor([0, *itertools.accumulate(n)], dtype=torch.int32, device=device)
            for n in (self.asking, shape.contexts)
        )
        new = [rows[len(rows) - n :] for rows, n in zip(self.rows, self.asking, strict=True)]
        self.own = torch.cat(new)[:, None].to(device) if shape.queries else None
        if not shape.queries:
            self.q[self.lens == 0] = torch.nan  # left by an earlier batch

    def layer(self, cached: bool = True) -> KVLayer:
        cache, shape = self.cache if cached else torch.empty(0), self.shape
        scale = shape.width**-0.5
        return KVLayer(cache, cache, scale, shape.window, value_width=shape.value_width)

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The sums of values in float64, and those of their absolute values."""
        sums = torch.zeros(2, *self.q.shape[:2], self.shape.value_width, dtype=torch.float64)
        owners = [i for i, count in enumerate(self.asking) for _ in range(count)]
        q = self.q.cpu().double()
        for token, (owner, n) in enumerate(zip(owners, self.shape.lens, strict=True)):
            first = max(0, n - self.shape.window) if self.shape.window else 0
            seen = self.rows[owner][first:n].double()
            weights = (q[token] @ seen.T * self.shape.width**-0.5).softmax(-1) if n else None
            if weights is not None:
                values = seen[:, : self.shape.value_width]
                sums[0, token], sums[1, token] = weights @ values, weights @ values.abs()
        return sums[0], sums[1]

    def check(self, out: torch.Tensor) -> None:
        """Each weight and each result may be rounded once; float32 loses less than 2e-5."""
        expected, spread = self.expected()
        assert out.shape == expected.shape and out.dtype == self.shape.dtype
        eps = 0.0 if self.shape.dtype == FP32 else torch.finfo(self.shape.dtype).eps
        excess = (out.cpu().double() - expected).abs() / ((eps + 2e-5) * spread + 1e-7)
        worst = excess.nan_to_num(torch.inf).flatten(1).amax(1)
        assert worst.max() <= 1, f"{worst.max():.3g} times what is allowed, row {worst.argmax()}"
