"""Prefill attention with an explicit mask: to a cached part, with a window, a soft cap or sinks.

It is loaded when a step has such sequences.
"""

import torch
import torch.nn.functional as F

from nanovllm.kernels.kv_layer import KVLayer

# Elements of one mask. This bounds the memory of chunks that attend to long prefixes.
MAX_MASK_ELEMENTS = 1 << 24


def attend_in_slices(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    q_starts: torch.Tensor,
    k_starts: torch.Tensor,
    k_lens: torch.Tensor,
    kv: KVLayer,
    hides_nan: bool = False,
) -> torch.Tensor:
    """Attention of queries [B, H, Q, D] from any position of a context on, a few at a time.

    A mask does not hide keys and values that are NaN, which another sequence may have left: on a
    CPU, where a result shows it, those that no query sees are set to zero first.
    """
    batch_size, num_heads, num_queries, _ = queries.shape
    offsets = torch.arange(keys.shape[2], device=queries.device)
    key_positions = k_starts[:, None, None, None] + offsets  # [B, 1, 1, K]
    if hides_nan:
        hidden = key_positions >= k_lens[:, None, None, None]
        if kv.window is not None:
            hidden |= key_positions <= q_starts[:, None, None, None] - kv.window
        hidden = hidden.transpose(2, 3)  # [B, 1, K, 1]
        keys, values = keys.masked_fill(hidden, 0), values.masked_fill(hidden, 0)
    of_query = batch_size * keys.shape[2]
    if kv.needs:
        of_query *= num_heads  # the scores take as much memory as a mask for each head
    step = max(1, MAX_MASK_ELEMENTS // of_query)
    outs = []
    for start in range(0, num_queries, step):
        slice_ = queries[:, :, start : start + step]
        offsets = torch.arange(start, start + slice_.shape[2], device=queries.device)
        positions = q_starts[:, None, None, None] + offsets[:, None]  # [B, 1, Q, 1]
        mask = key_positions <= positions
        if kv.window is not None:
            mask &= key_positions > positions - kv.window
        if kv.needs:
            from nanovllm.kernels.plain.scores import attend_by_scores

            outs.append(attend_by_scores(slice_, keys, values, mask, kv))
            continue
        outs.append(
            F.scaled_dot_product_attention(
                slice_, keys, values, attn_mask=mask, scale=kv.scale,
                enable_gqa=True,
            )
        )  # fmt: skip
    out = torch.cat(outs, dim=2)
    if out.is_cpu and not hides_nan and not abs(float(out.sum())) < torch.inf:
        return attend_in_slices(
            queries, keys, values, q_starts, k_starts, k_lens, kv, hides_nan=True
        )
    return out
