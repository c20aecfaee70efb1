"""Drafts for tests: proposers that are right, wrong, or both, and a pace that always asks."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from reference import make_llm

from nanovllm import LLM
from nanovllm.drafting.guesser import Guesser
from nanovllm.drafting.host_drafting import HostDrafting
from nanovllm.drafting.pace import Pace
from nanovllm.drafting.paced_drafting import PacedDrafting
from nanovllm.drafting.table_drafting import TableDrafting
from nanovllm.engine.run.padded import PrefillSize
from nanovllm.engine.run.prefill_graphs import ShortPrefill, prefill_graphs
from nanovllm.engine.schedule.batch import Size
from nanovllm.engine.schedule.sequence import Sequence
from nanovllm.kernels.plain.guess_ngrams import guess_ngrams
from nanovllm.kernels.plain.read_table import NO_DRAFT, TableState


class Eager(Pace):
    """As many drafts as fit, whatever became of the last ones."""

    def most(self, num_tokens: int, worth: float, limit: int, guess: float = 0.0) -> int:
        return max(0, limit)


class RandomProposer:
    """Random tokens, of random lengths: more than asked for at times, or none.

    For a sequence that may have few tokens they are of those.
    """

    def __init__(self, seed: int, num_tokens: int) -> None:
        self.rng, self.num_tokens = random.Random(seed), num_tokens
        self.on_propose: Callable[[list[Sequence]], None] = lambda _: None

    def propose(self, seqs: list[Sequence], most: list[int]) -> list[list[int]]:
        self.on_propose(seqs)
        return [self.guess(seq, number) for seq, number in zip(seqs, most, strict=True)]

    def guess(self, seq: Sequence, most: int) -> list[int]:
        length = self.rng.choice([0, 1, most, most + 3, self.rng.randint(0, most)])
        return self.rng.choices(seq.params.allowed_token_ids or range(self.num_tokens), k=length)

    def reset(self) -> None:
        pass


class Adversary(RandomProposer):
    """Knows how sequences go on, and at times lies from some place on.

    `outputs` are known by prompt and by the sample's number. It goes on after the end of an output,
    with tokens that would come if the sequence did not stop, or with any.
    """

    def __init__(
        self, seed: int, num_tokens: int, outputs: Mapping[tuple[tuple[int, ...], int], list[int]]
    ) -> None:
        super().__init__(seed, num_tokens)
        self.outputs = outputs

    def guess(self, seq: Sequence, most: int) -> list[int]:
        guess = super().guess(seq, most)
        prompt = tuple(seq.token_ids[: seq.num_prompt_tokens])
        known = self.outputs.get((prompt, seq.index), [])[seq.num_tokens - seq.num_prompt_tokens :]
        num_right = self.rng.choice([0, len(guess), len(guess), self.rng.randint(0, len(guess))])
        right = known[:num_right]
        return right + guess[len(right) :]


def speculate(llm: LLM, adversary: Adversary, most_drafts: int = 5) -> PacedDrafting:
    """Let an engine verify the adversary's drafts; where the device guesses, one like it there.

    Where other ranks guess, too, all go on with their own guessers.
    """
    if llm.config.tensor_parallel_size > 1 and llm.model_runner.shard.placement.most_drafts:
        llm.scheduler.drafting = in_table = _table_drafting(llm, most_drafts)
        return in_table
    if not llm.model_runner.shard.placement.most_drafts:
        llm.scheduler.drafting = drafting = HostDrafting(adversary, most_drafts, Eager)
        return drafting
    texts = [[*prompt, *output] for (prompt, _), output in adversary.outputs.items()]
    return speculate_in_table(llm, texts, 3, adversary.num_tokens, most_drafts)[0]


def drafting_of(llm: LLM) -> PacedDrafting:
    """The engine's own drafting, which must be there."""
    assert isinstance(llm.scheduler.drafting, PacedDrafting)
    return llm.scheduler.drafting


def _table_drafting(llm: LLM, most_drafts: int) -> TableDrafting:
    return TableDrafting(most_drafts, Eager, mixes=llm.config.scheduling == "mixed")


def make_eager(path: Path, config: dict[str, Any], **options: Any) -> LLM:
    """An engine in which all sequences get as many drafts as fit."""
    llm = make_llm(path, **options | {"speculative_config": config})
    drafting_of(llm)._make_pace = Eager
    return llm


def use_graphs(llm: LLM) -> None:
    """Compute steps as in graphs: padded, with block tables of full width."""
    shard = llm.model_runner.shard
    shard.graphs = shard.decode_graphs(llm.config.max_num_running)
    shard.short_prefills = prefill_graphs(shard, llm.config.max_num_running)


def sizes_of_short_prefills(llm: LLM) -> list[PrefillSize]:
    """A list that will hold the sizes in which short prefills run; they must run in some."""
    graphs, sizes = llm.model_runner.shard.short_prefills, list[PrefillSize]()
    assert graphs is not None
    run = graphs.run

    def recording(size: PrefillSize) -> ShortPrefill:
        sizes.append(size)
        return run(size)

    graphs.run = recording  # type: ignore[method-assign]
    return sizes


class TableAdversary(Guesser):
    """An adversary that guesses in the device table, from the tokens that it finds there."""

    reads_history = True

    def __init__(self, seed: int, num_tokens: int, texts: list[list[int]]) -> None:
        self.rng, self.num_tokens, self.texts = random.Random(seed), num_tokens, texts
        self.num_guesses = 0

    def guess(self, table: TableState, size: Size) -> None:
        """Right and wrong drafts, some or none."""
        if size.num_queries == 1:
            return
        most, state = size.num_queries - 1, table.drafts
        guess_ngrams(table, size.num_seqs, most, 1, 1)  # completes the history
        for row in table.batch[: size.num_seqs].tolist():
            last = int(table.lengths[row])
            if last < 0:
                continue
            self.num_guesses += 1
            before = state.history[row, : last + 1].tolist()
            length = self.rng.choice([0, 1, most, most, self.rng.randint(0, most)])
            guess = self.rng.choices(range(self.num_tokens), k=length)
            known = next((text for text in self.texts if text[: last + 1] == before), before)
            num_right = self.rng.choice([0, length, length, self.rng.randint(0, length)])
            right = known[last + 1 :][:num_right]
            drafts = right + guess[len(right) :] + [NO_DRAFT] * (most - length)
            state.tokens[row, :most] = torch.tensor(drafts, dtype=torch.int32)


def speculate_in_table(
    llm: LLM, texts: list[list[int]], seed: int, num_tokens: int, most_drafts: int = 5
) -> tuple[TableDrafting, TableAdversary]:
    """Let an engine verify what an adversary guesses that knows prompts with their outputs."""
    guesser = TableAdversary(seed, num_tokens, texts)
    shard = llm.model_runner.shard
    shard.drafting = shard.parts[0] = shard.prefills.drafting = shard.decodes.drafting = guesser
    llm.scheduler.drafting = drafting = _table_drafting(llm, most_drafts)
    return drafting, guesser
