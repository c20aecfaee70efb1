"""Run a job: keep an engine busy with the lines of an input, and the journal up to date.

Lines are read when there is room for them, so that an input of any size takes the memory of a few
batches. A line's samples depend on its id and its parameters, not on the lines around it and not on
how often the job was restarted.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nanovllm.batch.digests import Seen, digest_of
from nanovllm.batch.envelope import custom_id_of, parse_line
from nanovllm.batch.journal import Journal
from nanovllm.batch.lines import Line
from nanovllm.batch.records import error_record, result_record
from nanovllm.batch.submit import Submitted, check_tokenizer, submit
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.utils.checks import shorten

LINE_ID = re.compile("line-[0-9]+")  # the ids of lines without one
QUEUED = 2  # sequences in the engine for each one that can run: one runs, another waits


@dataclass(slots=True)
class Tally:
    """Counts of the lines that a run has settled so far."""

    computed: int = 0
    failed: int = 0
    skipped: int = 0  # finished by an earlier run
    tokens: int = 0

    @property
    def lines(self) -> int:
        """The number of settled lines."""
        return self.computed + self.failed + self.skipped


@dataclass(frozen=True, slots=True)
class PendingLine:
    """A line with requests in the engine, and the outputs of the finished ones."""

    number: int
    custom_id: str
    submitted: Submitted
    outputs: list[RequestOutput] = field(default_factory=list)


class BatchJob:
    """One run over an input. `defaults` are sampling parameters for lines without them.

    A bad line becomes an error record. If the job is `strict` it is a ValueError instead, and
    neither the line nor a later one is written.
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
        self._pending: dict[int, PendingLine] = {}
        self._room = QUEUED * llm.config.max_num_seqs

    def run(self, lines: Iterable[Line]) -> Iterator[Tally]:
        """Settle all `lines`; yield the tally after each line and each step."""
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
        """Skip a line, queue its request, or write its error."""
        custom_id, value = self._identify(line)
        if self.journal.take(line.number, custom_id):
            self.tally.skipped += 1
            return
        try:
            if isinstance(value, Exception):
                raise value
            submitted = submit(self.llm, custom_id, value, self.defaults)
        except (TypeError, ValueError) as error:
            if self.strict:
                raise ValueError(f"line {line.number}: {error}") from error
            self.journal.append([error_record(line.number, custom_id, str(error))])
            self.tally.failed += 1
            return
        pending = PendingLine(line.number, custom_id, submitted)
        for request_id in submitted.request_ids:
            self._pending[request_id] = pending
            self._room -= submitted.num_samples

    def _identify(self, line: Line) -> tuple[str, dict[str, Any] | Exception]:
        """A line's id, and its object or its error.

        Ids are unique: a line with an earlier line's id is an error, and its record is `line-N`.
        """
        own_id = f"line-{line.number}"
        try:
            value = parse_line(line.data)
            custom_id = custom_id_of(value)
            if custom_id is None:
                custom_id = own_id
            if LINE_ID.fullmatch(custom_id) and custom_id != own_id:
                raise ValueError(f"custom_id {custom_id!r} is the id of another line without one")
            if not self._seen.add(digest_of(custom_id)):
                raise ValueError(
                    f"custom_id {shorten(custom_id)} is already the id of an earlier line"
                )
        except (TypeError, ValueError) as error:
            return own_id, error
        return custom_id, value

    def _step(self) -> None:
        """Run a step, and write the records of the requests that it finishes."""
        records = []
        for output in self.llm.step():
            pending = self._pending.pop(output["request_id"])
            self._room += pending.submitted.num_samples
            pending.outputs.append(output)
            if len(pending.outputs) < len(pending.submitted.request_ids):
                continue
            place = (pending.number, pending.custom_id)
            failed = next(filter(_has_failed, pending.outputs), None)
            if failed is not None:
                self.tally.failed += 1
                records.append(error_record(*place, str(failed["stop_reason"])))
                continue
            self.tally.computed += 1
            self.tally.tokens += sum(len(sample["token_ids"]) for sample in output["outputs"])
            body = pending.submitted.body(str(pending.number), pending.outputs)
            records.append(result_record(*place, body))
        if records:
            self.journal.append(records)


def _has_failed(output: RequestOutput) -> bool:
    """Whether all samples have ended with an error."""
    return all(sample["finish_reason"] == "error" for sample in output["outputs"])
