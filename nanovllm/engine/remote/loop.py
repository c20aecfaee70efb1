"""EngineLoop: runs an engine in its own process, by commands from its caller.

It is imported without PyTorch.
"""

import dataclasses
import pickle
import queue
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.ranks.frames import sendable
from nanovllm.engine.remote.compilers import Compilers
from nanovllm.engine.remote.messages import (
    Ask,
    Command,
    DropRequest,
    EngineAnswer,
    Event,
    NewTokens,
    PromptProgress,
    Question,
    Quit,
    RequestEnd,
    RequestRefused,
    SampleProgress,
    StopSample,
    SubmitRequest,
)
from nanovllm.engine.remote.outbox import Outbox
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.requests.intake import Accepted
    from nanovllm.engine.requests.request import Request


class CheckedRequest(NamedTuple):
    """A request that a thread has checked and compiled, or the error that refuses it."""

    number: int
    result: "Accepted | Exception"


class ReportedRequest:
    """A request in the engine, and how many tokens of each sample were sent to the caller."""

    def __init__(self, number: int, request: "Request") -> None:
        self.number, self.request = number, request
        self.reported = [0] * len(request.seqs)
        self.num_of_prompt = 0  # log-probabilities
        self.ended = [False] * len(request.seqs)

    def progress(self, tokens: NewTokens) -> list[Event]:
        """Progress since the last call. A sample with just one new token is added to `tokens`."""
        events: list[Event] = [*self._of_prompt()]
        for seq in self.request.seqs:
            if self.ended[seq.index]:
                continue
            start, end = seq.num_prompt_tokens + self.reported[seq.index], seq.num_known_tokens
            is_finished = seq.status is SequenceStatus.FINISHED
            if end <= start and not is_finished:
                continue
            self.reported[seq.index] = end - seq.num_prompt_tokens
            self.ended[seq.index] = is_finished
            if end == start + 1 and not is_finished and seq.params.logprobs is None:
                tokens.numbers.append(self.number)
                tokens.samples.append(seq.index)
                tokens.token_ids.append(seq.token_ids[start])
            else:
                events.append(_progress(self.number, seq, start))
        return events

    def _of_prompt(self) -> Iterator[PromptProgress]:
        """The log-probabilities of the prompt since the last call: all at once can be many."""
        first = self.request.seqs[0]
        if first.params.prompt_logprobs is not None:
            start, known = self.num_of_prompt, first.parts.logprobs.prompt
            self.num_of_prompt = len(known)
            if start < len(known):
                yield PromptProgress(self.number, known[start:])

    def ending(self) -> RequestEnd:
        """The last event: all samples have ended."""
        first, times = self.request.seqs[0], self.request.times
        keepers = [seq.parts.keeper for seq in self.request.seqs]
        kept = None if first.parts.keeper is None else keepers
        return RequestEnd(self.number, times, first.num_hit_tokens or 0, kept)


def _whole_params(command: SubmitRequest) -> SamplingParams:
    """The command's parameters with their callables."""
    if command.processors is None:
        return command.params
    try:
        calls = pickle.loads(command.processors)
    except Exception as error:
        raise ValueError(
            "logits_processors must be importable in the engine's process, which is another one:"
            f" {type(error).__name__}: {error}"
        ) from None
    return dataclasses.replace(command.params, logits_processors=calls)


def _pickled(value: Any, method: str) -> bytes:
    """Pickle a method's result for the caller."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"results of {method} must pickle, as they are sent to another process:"
            f" {type(error).__name__}: {error}"
        ) from None


def _progress(number: int, seq: Sequence, start: int) -> SampleProgress:
    likely = None
    if seq.params.logprobs is not None:
        likely = seq.parts.logprobs.generated(seq, start)
    tokens = seq.token_ids[start : seq.num_known_tokens]
    return SampleProgress(number, seq.index, tokens, likely, seq.finish_reason, seq.stop_reason)


class EngineLoop:
    """Steps an engine as long as it has requests; between steps it takes commands.

    Meanwhile the threads of `Compilers` compile constraints, tokenize bad words and read adapters.
    `answers` has the function that answers each question.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        answers: "Mapping[Question, Callable[..., Any]]",
        commands: "queue.SimpleQueue[Command | CheckedRequest | EngineAnswer | BaseException]",
        outbox: Outbox,
    ) -> None:
        self._engine, self._answers = engine, answers
        self._commands, self._outbox = commands, outbox
        self._compilers = Compilers()
        self._followed: dict[int, ReportedRequest] = {}  # by the caller's number
        self._numbers: dict[int, int] = {}  # the caller's number by the engine's id

    def run(self) -> None:
        """Serve until the caller ends it."""
        while self._take_commands():
            if self._can_step:
                self._engine.alone(self._engine.advance)
                self._report()
        self._compilers.close()

    @property
    def _can_step(self) -> bool:
        return bool(self._engine.requests.unfinished) and self._engine.refusal is None

    def _take_commands(self) -> bool:
        """Run the commands; without requests to compute, wait for a command. False: quit."""
        while True:
            for number, error in self._compilers.late():
                self._enqueue(number, error)
            try:
                if self._can_step:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(timeout=self._compilers.tick)
            except queue.Empty:
                return True
            if isinstance(command, Quit):
                return False
            self._do(command)

    def _do(self, command: "Command | CheckedRequest | EngineAnswer | BaseException") -> None:
        if isinstance(command, SubmitRequest):
            self._submit(command)
        elif isinstance(command, CheckedRequest):
            if self._compilers.drop(command.number):
                self._enqueue(command.number, command.result)
        elif isinstance(command, DropRequest):
            self._compilers.drop(command.number)
            if (followed := self._followed.pop(command.number, None)) is not None:
                del self._numbers[followed.request.request_id]
                self._engine.discard_requests([followed.request.request_id])
        elif isinstance(command, StopSample):
            self._stop(command)
        elif isinstance(command, BaseException):  # a rank has ended
            raise command
        elif isinstance(command, EngineAnswer):
            self._outbox.send([command])
        elif isinstance(command, Ask) and not command.between_steps:
            self._compilers.read(self._answer_in_thread, command)
        elif isinstance(command, Ask):
            self._outbox.send([self._answer(command)])
            self._report()  # the failure may have ended requests

    def _answer(self, command: Ask) -> EngineAnswer:
        """Answer a question. An error ends the engine only if a rank has ended."""
        try:
            args, options = pickle.loads(command.arguments)
            value = self._answers[command.question](*args, **options)
            return EngineAnswer(command.number, _pickled(value, command.question))
        except BaseException as error:  # a caller's function may raise SystemExit
            self._engine.model_runner.check()
            return EngineAnswer(command.number, error=sendable(error))

    def _answer_in_thread(self, command: Ask) -> None:
        """Answer in a thread, which puts the answer, or a fatal error, into the commands."""
        try:
            self._commands.put(self._answer(command))
        except BaseException as error:
            self._commands.put(error)

    def _submit(self, command: SubmitRequest) -> None:
        params = command.params
        takes_long = params.structured_outputs or params.bad_words or command.processors
        if not takes_long and command.lora_request is None:
            self._enqueue(command.number, self._accept(command))
            return
        compiles = self._engine.intake.compiles(params)
        seconds = command.grammar_seconds if compiles else None
        self._compilers.check(command.number, lambda: self._compile(command), seconds)

    def _compile(self, command: SubmitRequest) -> None:
        """Check a request in a thread, which puts the result into the commands."""
        self._commands.put(CheckedRequest(command.number, self._compiled(command)))

    def _compiled(self, command: SubmitRequest) -> "Accepted | Exception":
        """The checked request. An error refuses only this request."""
        try:
            return self._accept(command)
        except BaseException as error:  # llguidance's panics are no Exceptions
            return RuntimeError(f"{type(error).__name__}: {error}")

    def _accept(self, command: SubmitRequest) -> "Accepted | Exception":
        """Check a request, and compile its constraint."""
        if self._engine.refusal is not None:
            return self._engine.refusal
        try:
            token_ids = array("i", command.token_ids).tolist()
            asked = command.wanted, command.lora_request
            accepted = self._engine.intake.accept(token_ids, _whole_params(command), *asked)
            return dataclasses.replace(accepted, salt=command.salt) if command.salt else accepted
        except (NotReadyError, TypeError, ValueError) as error:
            return error

    def _enqueue(self, number: int, accepted: "Accepted | Exception") -> None:
        if isinstance(accepted, Exception):
            self._outbox.send([RequestRefused(number, accepted)])
            return
        request_id = self._engine.enqueue(accepted)
        request = self._engine.requests.unfinished[request_id]
        self._followed[number] = ReportedRequest(number, request)
        self._numbers[request_id] = number

    def _stop(self, command: StopSample) -> None:
        followed = self._followed.get(command.number)
        if followed is not None and not followed.ended[command.sample]:
            self._engine.alone(self._engine.requests.stop, followed.request, command.sample)
            self._report()

    def _report(self) -> None:
        """Send the new tokens and ends of a step."""
        tokens = NewTokens([], [], [])
        events: list[Event] = []
        ended = []
        running = dict.fromkeys(seq.request_id for seq in self._engine.scheduler.running)
        for request_id in (*running, *(self._engine.requests.finished.keys() - running.keys())):
            followed = self._followed[self._numbers[request_id]]
            events += followed.progress(tokens)
            if not followed.request.unfinished:
                events.append(followed.ending())
                ended.append(followed)
        for followed in ended:
            del self._followed[followed.number], self._numbers[followed.request.request_id]
            self._engine.requests.drop_output(followed.request.request_id)
        if tokens.numbers:
            events.append(tokens)
        if events:
            self._outbox.send(events)
