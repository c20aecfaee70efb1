"""EngineLoop: an engine in its own process, which does what its caller's messages say.

PyTorch is imported late: the process must first be able to notice the end of its caller.
"""

import contextlib
import dataclasses
import os
import pickle
import queue
import signal
import socket
import threading
import time
import traceback
from array import array
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.ranks.answers import sendable
from nanovllm.engine.ranks.life_line import end_with
from nanovllm.engine.remote.frames import Outbox, receive
from nanovllm.engine.remote.messages import (
    Answer,
    Ask,
    Command,
    Drop,
    Ended,
    Event,
    Failed,
    Progress,
    Question,
    Quit,
    Ready,
    Refused,
    Stop,
    Submit,
    Tokens,
)
from nanovllm.engine.schedule.sequence import Sequence, SequenceStatus
from nanovllm.models.registry import register_all
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.heap import keep_what_lives
from nanovllm.utils.log import log_to_stderr

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.engine.requests.intake import Accepted
    from nanovllm.engine.requests.request import Request

COMPILERS = 2  # threads that compile constraints, while steps go on
REPORT_SECONDS = 10.0  # for the last message to leave
RETRY_SECONDS = 0.001  # until what a slow caller had no room for is sent again


class Compiled(NamedTuple):
    """A request whose constraint is ready, or the error that refuses it."""

    number: int
    result: "Accepted | Exception"


class Followed:
    """A request of the caller, and how many tokens of each sample were reported."""

    def __init__(self, number: int, request: "Request") -> None:
        self.number, self.request = number, request
        self.reported = [0] * len(request.seqs)
        self.ended = [False] * len(request.seqs)

    def progress(self, tokens: Tokens) -> list[Progress]:
        """What is new since the last call; a single token without more goes to `tokens`."""
        events = []
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

    def ending(self) -> Ended:
        """The last event: all samples have ended."""
        first, times = self.request.seqs[0], self.request.times
        asked = first.params.prompt_logprobs is not None
        likely = first.logprobs.prompt if asked else None
        states = [seq.keeper for seq in self.request.seqs] if first.params.hidden_states else None
        kept = None if first.generates else first.keeper
        return Ended(self.number, times, first.num_hit_tokens or 0, likely, kept, states)


def _whole_params(command: Submit) -> SamplingParams:
    """The parameters with their callables."""
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
    """A method's result as it is sent to the caller."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:
        raise TypeError(
            f"results of {method} must pickle, as they are sent to another process:"
            f" {type(error).__name__}: {error}"
        ) from None


def _progress(number: int, seq: Sequence, start: int) -> Progress:
    likely = None
    if seq.params.logprobs is not None:
        likely = seq.logprobs.generated(seq, start)
    tokens = seq.token_ids[start : seq.num_known_tokens]
    return Progress(number, seq.index, tokens, likely, seq.finish_reason, seq.stop_reason)


class EngineLoop:
    """Steps an engine as long as it has requests; between steps it takes commands.

    Constraints are compiled, bad words tokenized and adapters read by other threads meanwhile.
    """

    def __init__(
        self,
        engine: "LLMEngine",
        answers: "Mapping[Question, Callable[..., Any]]",
        commands: "queue.SimpleQueue[Command | Compiled | Answer | BaseException]",
        outbox: Outbox,
    ) -> None:
        self._engine, self._answers = engine, answers
        self._commands, self._outbox = commands, outbox
        self._compilers = ThreadPoolExecutor(COMPILERS, thread_name_prefix="nanovllm-compile")
        self._compiling: set[int] = set()  # numbers; those that were dropped meanwhile are gone
        self._followed: dict[int, Followed] = {}  # by the caller's number
        self._numbers: dict[int, int] = {}  # the caller's numbers by the engine's

    def run(self) -> None:
        """Serve until the caller ends it."""
        while self._take_commands():
            if self._can_step:
                self._engine.run_step()
                self._report()
        self._compilers.shutdown(wait=False, cancel_futures=True)

    @property
    def _can_step(self) -> bool:
        return bool(self._engine.unfinished) and self._engine.refusal is None

    def _take_commands(self) -> bool:
        """Do what has been asked for; wait for it if there is nothing else to do. False: quit."""
        while True:
            all_sent = self._outbox.flush()
            try:
                if self._can_step:
                    command = self._commands.get_nowait()
                else:
                    command = self._commands.get(timeout=None if all_sent else RETRY_SECONDS)
            except queue.Empty:
                return True
            if isinstance(command, Quit):
                return False
            self._do(command)

    def _do(self, command: "Command | Compiled | Answer | BaseException") -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Compiled):
            if command.number in self._compiling:
                self._compiling.remove(command.number)
                self._enqueue(command.number, command.result)
        elif isinstance(command, Drop):
            self._compiling.discard(command.number)
            if (followed := self._followed.pop(command.number, None)) is not None:
                del self._numbers[followed.request.request_id]
                self._engine.discard_requests([followed.request.request_id])
        elif isinstance(command, Stop):
            self._stop(command)
        elif isinstance(command, BaseException):  # a rank has ended
            raise command
        elif isinstance(command, Answer):
            self._outbox.send([command])
        elif isinstance(command, Ask) and command.beside:
            self._compilers.submit(self._answer_beside, command)
        elif isinstance(command, Ask):
            self._outbox.send([self._answer(command)])
            self._report()  # it may have ended requests

    def _answer(self, command: Ask) -> Answer:
        """Answer a question. An error ends the engine only if a rank has ended."""
        try:
            args, options = pickle.loads(command.arguments)
            value = self._answers[command.question](*args, **options)
            return Answer(command.number, _pickled(value, command.question))
        except BaseException as error:  # a caller's function may raise SystemExit
            self._engine.model_runner.check()
            return Answer(command.number, error=sendable(error))

    def _answer_beside(self, command: Ask) -> None:
        """Answer in a thread: the answer, or what ends the engine, goes to the commands."""
        try:
            self._commands.put(self._answer(command))
        except BaseException as error:
            self._commands.put(error)

    def _submit(self, command: Submit) -> None:
        params = command.params
        takes_long = params.structured_outputs or params.bad_words or command.processors
        if not takes_long and command.lora_request is None:
            self._enqueue(command.number, self._accept(command))
            return
        self._compiling.add(command.number)
        self._compilers.submit(self._compile, command)

    def _compile(self, command: Submit) -> None:
        """Check a request in a thread of its own; the result goes to the commands."""
        self._commands.put(Compiled(command.number, self._compiled(command)))

    def _compiled(self, command: Submit) -> "Accepted | Exception":
        """The checked request. What goes wrong refuses this request alone."""
        if command.number not in self._compiling:  # its caller has gone
            return RuntimeError("the request was dropped")
        try:
            return self._accept(command)
        except BaseException as error:  # llguidance's panics are no Exceptions
            return RuntimeError(f"{type(error).__name__}: {error}")

    def _accept(self, command: Submit) -> "Accepted | Exception":
        """Check a request, and compile its constraint."""
        if self._engine.refusal is not None:
            return self._engine.refusal
        try:
            token_ids = array("i", command.token_ids).tolist()
            asked = command.wanted, command.lora_request
            return self._engine.accept(token_ids, _whole_params(command), *asked)
        except (NotReadyError, TypeError, ValueError) as error:
            return error

    def _enqueue(self, number: int, accepted: "Accepted | Exception") -> None:
        if isinstance(accepted, Exception):
            self._outbox.send([Refused(number, accepted)])
            return
        request_id = self._engine.enqueue(accepted)
        self._followed[number] = Followed(number, self._engine.unfinished[request_id])
        self._numbers[request_id] = number

    def _stop(self, command: Stop) -> None:
        followed = self._followed.get(command.number)
        if followed is not None and not followed.ended[command.sample]:
            self._engine.stop_sample(followed.request, command.sample)
            self._report()

    def _report(self) -> None:
        """Send what a step has brought."""
        tokens = Tokens([], [], [])
        events: list[Event] = []
        ended = []
        running = dict.fromkeys(seq.request_id for seq in self._engine.scheduler.running)
        for request_id in (*running, *(self._engine.finished.keys() - running.keys())):
            followed = self._followed[self._numbers[request_id]]
            events += followed.progress(tokens)
            if not followed.request.unfinished:
                events.append(followed.ending())
                ended.append(followed)
        for followed in ended:
            del self._followed[followed.number], self._numbers[followed.request.request_id]
            self._engine.drop_output(followed.request.request_id)
        if tokens.numbers:
            events.append(tokens)
        if events:
            self._outbox.send(events)


def main(caller: int, line: int, connection: int) -> None:
    """Serve an engine whose model, options and level of logging come as the first message."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the caller decides about the end
        signal.signal(number, signal.SIG_IGN)
    end_with(caller, line)
    link = socket.socket(fileno=connection)
    outbox = Outbox(link)
    try:
        _serve(link, outbox)
    except BaseException as error:
        _report_failure(outbox, error)
        os._exit(1)
    os._exit(0)


def _serve(link: socket.socket, outbox: Outbox) -> None:
    from nanovllm.engine.remote.served import ServedEngine, answers_of

    model, options, level, families = receive(link)
    log_to_stderr(level)  # the caller's handlers are in its process
    register_all(families)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine = ServedEngine(model, **options)
    try:
        read_vocabulary(engine)
        keep_what_lives()
        outbox.send(Ready(engine.config, engine.model_config))
        threading.Thread(target=_read, args=(link, commands), daemon=True).start()
        EngineLoop(engine, answers_of(engine), commands, outbox).run()
    finally:
        engine.close()


def read_vocabulary(engine: "LLMEngine") -> None:
    """Make llguidance read the vocabulary now: it holds the GIL, which would stop later steps."""
    constrained = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with contextlib.suppress(ValueError):  # there is no text: a constraint is refused
        engine.accept([0], constrained)


def _read(link: socket.socket, commands: "queue.SimpleQueue[Any]") -> None:
    """Put the caller's messages into the queue."""
    try:
        while True:
            commands.put(receive(link))
    except EOFError:
        commands.put(Quit())


def _report_failure(outbox: Outbox, error: BaseException) -> None:
    """Send the caller the exception, or its text if it cannot be sent."""
    details = traceback.format_exc()
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    deadline = time.monotonic() + REPORT_SECONDS
    with contextlib.suppress(OSError):
        outbox.send(Failed(error, details))
        while not outbox.flush() and time.monotonic() < deadline:
            time.sleep(RETRY_SECONDS)
