"""Writing a step's keys and values to the paged cache."""

import torch


def store_kvcache(
    key: torch.Tensor,
    value: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Write key, value [T, KVH, D] to slots [T] of the caches [blocks, block_size, KVH, D].

    Slot -1 writes nothing. Syncs where the device is not the CPU.
    """
    if slot_mapping.numel() and int(slot_mapping.min()) < 0:
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    k_cache.flatten(0, 1)[slot_mapping] = key
    v_cache.flatten(0, 1)[slot_mapping] = value
