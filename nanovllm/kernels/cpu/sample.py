"""Sample tokens in one pass over the logits, for greedy and temperature rows together."""

import torch

from nanovllm.kernels.cpu.library import address, constant, function


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor | None, keys: torch.Tensor | None
) -> torch.Tensor:
    """Token ids [B] for logits [B, V], as `plain/sample.py` defines them. Reads logits once."""
    out = logits.new_empty(len(logits), dtype=torch.int64)
    _sample(logits, temperatures, keys, None, None, out)
    return out


def sample_masked(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    rows: torch.Tensor,
    bitmaps: torch.Tensor,
    token_ids: torch.Tensor,
) -> None:
    """Write the token ids of the rows `rows` to `token_ids`, as `plain/mask.py` defines them.

    Copies nothing, and reads only logits near allowed tokens.
    """
    assert rows.dtype == token_ids.dtype == torch.int64 and bitmaps.dtype == torch.int32
    assert rows.is_contiguous() and token_ids.is_contiguous() and bitmaps.stride(1) == 1
    _sample(logits, temperatures, keys, rows, bitmaps, token_ids)


def _sample(
    logits: torch.Tensor,
    temperatures: torch.Tensor | None,
    keys: torch.Tensor | None,
    rows: torch.Tensor | None,
    bitmaps: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    num_rows, vocab_size = len(logits if rows is None else rows), logits.shape[1]
    assert logits.stride(1) == 1
    pieces = -(-vocab_size // constant("piece"))
    best = logits.new_empty(num_rows, pieces, dtype=torch.float32)
    ids = logits.new_empty(num_rows, pieces, dtype=torch.int64)
    if temperatures is None or keys is None:
        temperatures = keys = None
    else:
        assert temperatures.dtype == torch.float32 and keys.dtype == torch.int64
        assert temperatures.is_contiguous() and keys.is_contiguous()
    function("sample", logits.dtype)(
        logits.data_ptr(), logits.stride(0), address(temperatures), address(keys),
        address(rows), address(bitmaps), 0 if bitmaps is None else bitmaps.stride(0),
        out.data_ptr(), best.data_ptr(), ids.data_ptr(), num_rows, vocab_size,
        torch.get_num_threads(),
    )  # fmt: skip
