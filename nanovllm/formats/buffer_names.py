"""Names of families whose old files have buffers that the model computes, such as masks."""

from dataclasses import dataclass

from nanovllm.formats.names import Names


@dataclass(frozen=True)
class BufferNames(Names):
    """Names with ends of the names of `buffers`, which are left out."""

    buffers: tuple[str, ...] = ()

    def is_skipped(self, name: str) -> bool:
        return super().is_skipped(name) or name.endswith(self.buffers)
