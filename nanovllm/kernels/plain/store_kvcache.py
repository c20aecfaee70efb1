"""Write a step's keys and values to the paged cache."""

import torch

from nanovllm.kernels.kv_layer import KVLayer


def store_kvcache(
    key: torch.Tensor, value: torch.Tensor, kv: KVLayer, slot_mapping: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write key, value [T, KVH, D] to slots [T] of the caches, if there are any.

    A token with slot -1 is not written. Returns keys and values as the cache stores them: the same
    tensors, unless the cache is quantized. Syncs, except on the CPU.
    """
    kept: slice | torch.Tensor = slice(None)
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
    if kv.k_scales is not None:
        from nanovllm.kernels.plain.kv_codes import store_codes

        return store_codes(key, value, kv, slot_mapping, kept)
    if not kv.is_empty:
        kv.k_cache.flatten(0, 1)[slot_mapping[kept]] = key[kept]
        if kv.value_width is None:
            kv.v_cache.flatten(0, 1)[slot_mapping[kept]] = value[kept]
    return key, value
