"""Sizes of memory as texts."""

MIB, GIB = 1 << 20, 1 << 30


def memory_text(num_bytes: float) -> str:
    """A number of bytes in GiB, or in MiB if it is small."""
    if num_bytes < GIB / 10:
        return f"{num_bytes / MIB:,.1f} MiB"
    return f"{num_bytes / GIB:,.3f} GiB"
