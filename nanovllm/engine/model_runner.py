"""ModelRunner: rank 0's driver. It turns scheduled batches into token ids, on all ranks.

Its own shard computes beside the workers' shards; nothing else knows that there are other ranks.
"""

import os
from contextlib import nullcontext

from nanovllm.engine.batch import Batch
from nanovllm.engine.engine_config import EngineConfig
from nanovllm.engine.shard import Shard
from nanovllm.engine.step.draw_inputs import draw_inputs, needs_logits
from nanovllm.engine.step.inputs import step_inputs
from nanovllm.engine.step.launched import Launched
from nanovllm.engine.step.ledger import Ledger
from nanovllm.engine.step.reports import drawn_reports, prompt_reports
from nanovllm.engine.workers import Workers
from nanovllm.models.windows import longest


class ModelRunner:
    """Drives one of the started shards, and the workers if there are other ranks.

    The first shard's runner owns all of them, and the workers. A second shard is a draft model's,
    which another runner drives. They belong to the process `owner`: a forked one has copies of
    handles, and must not use them.
    """

    def __init__(
        self,
        shards: list[Shard],
        config: EngineConfig,
        workers: Workers | None = None,
        index: int = 0,
    ) -> None:
        self.owner = os.getpid()
        self.shards, self.index = shards, index
        self.shard = shard = shards[index]
        self.config = config
        self.workers = workers
        self.ledger = Ledger(shard.table.layout)

    def launch(self, batch: Batch) -> Launched:
        """Begin to compute a step. On a GPU with Triton's kernels it waits for nothing.

        Input tokens that are still in flight are read from the device table. What the draw needs is
        prepared while the device computes the logits.
        """
        shard, seqs, offsets = self.shard, batch.sampling_seqs, batch.offsets
        prompts = prompt_reports(batch.seqs) if batch.is_prefill else []
        whole = self.workers is None or needs_logits(seqs)
        inputs = step_inputs(batch, shard.block_size, self.ledger, prompts, whole)
        inputs.shard = self.index
        on_others = self.workers.step(inputs) if self.workers else nullcontext()
        with on_others, shard.computing():
            computed = shard.compute(inputs)
            size, kind = shard.vocab_size, shard.device.type
            draws = draw_inputs(seqs, size, kind, computed, offsets, batch.drafts)
            token_ids, columns = shard.draw(computed, draws)
            reports = [*prompts, *drawn_reports(seqs, offsets, draws.report)]
            return Launched(batch, token_ids, reports, computed.prompt_logprobs + columns)

    def wait(self, launched: Launched) -> list[int]:
        """Wait for a step's tokens. Raises RankError if a rank has ended."""
        with self.workers.waiting() if self.workers else nullcontext():
            launched.synchronize()
        return launched.wait()

    def recover(self) -> None:
        """Start over after an interrupt: the device table's rows are written again."""
        self.ledger.reset()

    @property
    def longest_window(self) -> int | None:
        """How far back the shards' models attend; None if a layer attends to all tokens."""
        return longest(shard.longest_window for shard in self.shards)

    @property
    def failure(self) -> str | None:
        """Why this runner cannot go on, if a rank has ended."""
        return self.workers.failure if self.workers else None

    def check(self) -> None:
        """Raise RankError if a rank has ended."""
        if self.workers:
            self.workers.check()

    def close(self) -> None:
        """Free the device's memory and end the other ranks; the runner cannot be used again.

        In a forked process, and for a draft model, it does nothing.
        """
        if os.getpid() == self.owner and self.index == 0:
            close_ranks(self.shards, self.workers)


def close_ranks(shards: list[Shard], workers: Workers | None) -> None:
    """Free rank 0's shards, and end the other ranks even if the device has failed."""
    try:
        for shard in shards:
            shard.close(device_works=workers is None or workers.failure is None)
    finally:
        if workers is not None:
            workers.close()
    for shard in shards:
        shard.return_memory()
