"""Sampler: from logits to token ids."""

import torch
from torch import nn

CHUNK = 256  # vocabulary entries that the first level of the draw sums up


class Sampler(nn.Module):
    """Greedy and temperature rows in one batch.

    A row draws by inverting its distribution function at one uniform number, which the host derives
    from the request's seed and the token's position: what a request draws depends on nothing else
    in the batch, and a row costs one random number instead of one for each vocabulary entry.
    """

    def forward(
        self, logits: torch.Tensor, temperatures: torch.Tensor | None, uniforms: torch.Tensor | None
    ) -> torch.Tensor:
        """Token ids [B] for logits [B, V]; `temperatures` None says that every row is greedy.

        Temperatures [B] in float32, 0 for greedy; uniforms [B] in float64, in [0, 1).
        """
        if temperatures is None or uniforms is None:
            return logits.max(dim=-1).indices  # the first of equals, as argmax, and faster
        return draw(logits, temperatures, uniforms)


def draw(logits: torch.Tensor, temperatures: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative softmax(logits / temperature) exceeds its row's uniform.

    At temperature 0 all but the largest logits weigh nothing, and the first of these is taken.
    Two levels: chunks of the vocabulary, then the tokens of one chunk. Sums run in float64, so that
    the tail of a large vocabulary keeps its mass. Peak memory: one float32 copy of the logits.
    """
    uniforms = torch.where(temperatures > 0, uniforms, 0.0)
    num_rows, vocab_size = logits.shape
    num_chunks = -(-vocab_size // CHUNK)
    weights = logits.new_zeros(num_rows, num_chunks * CHUNK, dtype=torch.float32)
    real = weights[:, :vocab_size]
    # The largest logit becomes 0, so that tiny temperatures and large logits cannot overflow.
    limits = torch.finfo(torch.float32)
    top = logits.amax(dim=-1, keepdim=True).float().clamp_max_(limits.max)
    real.copy_(logits).sub_(top).clamp_max_(0.0)  # a logit that overflowed to inf is the largest
    real.div_(temperatures.clamp_min(limits.tiny).unsqueeze(1)).exp_()
    chunks = weights.view(num_rows, num_chunks, CHUNK)
    chunk, rest = _invert(chunks.sum(dim=-1), uniforms)
    token, _ = _invert(chunks[torch.arange(num_rows, device=logits.device), chunk], rest)
    return (chunk * CHUNK + token).clamp_max_(vocab_size - 1)


def _invert(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Index where cumulative weights [B, N] pass `uniforms` [B], and the fraction of it passed.

    The index always has weight: the target stays under the total, whatever the rounding.
    """
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    target = torch.minimum(uniforms * total, below_total)
    index = torch.searchsorted(cumulative, target.unsqueeze(1), right=True)
    index.clamp_max_(weights.shape[1] - 1)  # NaNs stand outside the order
    weight = weights.gather(1, index).double().squeeze(1)
    before = cumulative.gather(1, index).squeeze(1) - weight
    rest = ((target - before) / weight).clamp(0.0, 1.0)
    return index.squeeze(1), rest
