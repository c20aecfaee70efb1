"""A job: it keeps an engine busy with the lines of an input, and the journal up to date.

Lines are read as there is room for them, so that an input of any size takes the memory of a few
batches. What a line samples hangs on its id and its parameters: not on the lines around it, and not
on how often the job was begun again.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.batch.journal import Journal, Seen, digest_of
from nanovllm.batch.lines import Line
from nanovllm.batch.submit import check_tokenizer, submit
from nanovllm.llm import LLM
from nanovllm.openai.request import BatchRequest, parse_line
from nanovllm.openai.response import error_record, result_record
from nanovllm.utils.checks import shorten

LINE_ID = re.compile("line-[0-9]+")  # what lines without an id get
QUEUED = 2  # how often the engine's running sequences are in it: one half runs, one waits


@dataclass(slots=True)
class Tally:
    """What a run has made of its lines so far."""

    computed: int = 0
    failed: int = 0
    skipped: int = 0  # done by a run before
    tokens: int = 0

    @property
    def lines(self) -> int:
        """How many are settled."""
        return self.computed + self.failed + self.skipped


@dataclass(frozen=True, slots=True)
class Pending:
    """A request in the engine, and where its answer belongs."""

    number: int
    custom_id: str
    request: BatchRequest


class Job:
    """One run over an input. `defaults` are sampling parameters of lines that do not say.

    A bad line becomes an error record; where the job is `strict` it is a ValueError, and nothing
    of it or of later lines is written.
    """

    def __init__(
        self, llm: LLM, journal: Journal, defaults: Mapping[str, Any], strict: bool = False
    ) -> None:
        check_tokenizer(llm)
        self.llm = llm
        self.journal = journal
        self.defaults = defaults
        self.strict = strict
        self.tally = Tally()
        self._seen = Seen()
        self._pending: dict[int, Pending] = {}
        self._room = QUEUED * llm.config.max_num_seqs

    def run(self, lines: Iterable[Line]) -> Iterator[Tally]:
        """Settle all `lines`; tell how it stands after each line and each step."""
        for line in lines:
            while self._room <= 0:
                self._step()
                yield self.tally
            self._take(line)
            yield self.tally
        while self._pending:
            self._step()
            yield self.tally

    def _take(self, line: Line) -> None:
        """Skip a line, queue its request, or write what is wrong with it."""
        custom_id, value = self._identify(line)
        if self.journal.has(line.number, custom_id):
            self.tally.skipped += 1
            return
        try:
            if isinstance(value, Exception):
                raise value
            request_id, request = submit(self.llm, custom_id, value, self.defaults)
        except (TypeError, ValueError) as error:
            if self.strict:
                raise ValueError(f"line {line.number}: {error}") from error
            self.journal.append([error_record(line.number, custom_id, str(error))])
            self.tally.failed += 1
            return
        self._pending[request_id] = Pending(line.number, custom_id, request)
        self._room -= request.params.n

    def _identify(self, line: Line) -> tuple[str, dict[str, Any] | Exception]:
        """A line's id, and its object or what is wrong with it.

        Ids differ: one that an earlier line has is an error, whose record has the line's own.
        """
        own_id = f"line-{line.number}"
        try:
            value = parse_line(line.data)
            custom_id = value.get("custom_id")
            if custom_id is None:
                custom_id = own_id
            if not isinstance(custom_id, str):
                raise TypeError(f"custom_id must be a text, got {shorten(custom_id)}")
            if LINE_ID.fullmatch(custom_id) and custom_id != own_id:
                raise ValueError(f"custom_id {custom_id!r} is what another line gets without one")
            if not self._seen.add(digest_of(custom_id)):
                raise ValueError(f"custom_id {shorten(custom_id)} is that of an earlier line")
        except (TypeError, ValueError) as error:
            return own_id, error
        return custom_id, value

    def _step(self) -> None:
        """Run a step, and write what it finishes."""
        records = []
        for output in self.llm.step():
            pending = self._pending.pop(output["request_id"])
            self._room += pending.request.params.n
            self.tally.computed += 1
            self.tally.tokens += sum(len(sample["token_ids"]) for sample in output["outputs"])
            place = (pending.number, pending.custom_id)
            records.append(result_record(*place, pending.request, output, self.llm))
        if records:
            self.journal.append(records)
