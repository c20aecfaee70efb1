"""The entry of an engine's own process: makes the engine, and the answers to callers' questions.

It gives both to the engine's loop, which imports no feature itself. PyTorch is imported late: the
process must first be able to notice the end of its caller.
"""

import contextlib
import os
import pickle
import queue
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.engine.ranks.frames import receive
from nanovllm.engine.ranks.life_line import end_with
from nanovllm.engine.remote.loop import EngineLoop
from nanovllm.engine.remote.messages import EngineFailed, EngineReady, Question, Quit
from nanovllm.engine.remote.outbox import Outbox
from nanovllm.features import has_room
from nanovllm.models.outside import register_families
from nanovllm.sampling_params import SamplingParams
from nanovllm.structured_outputs import StructuredOutputs
from nanovllm.utils.log import log_to_stderr
from nanovllm.utils.resources import keep_what_lives
from nanovllm.utils.threads import serve_many_threads

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import LLMEngine
    from nanovllm.llm import LLM

REPORT_SECONDS = 10.0  # to send the last message


def main(caller: int, line: int, connection: int) -> None:
    """Serve an engine; the first message has its model, its options and the level of logging."""
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
    from nanovllm.llm import LLM

    class ServedLLM(LLM):
        """An LLM that does not warn about a missing tokenizer: the caller warns."""

        _warns = False

    model, options, level, families = receive(link)
    log_to_stderr(level)  # the caller's handlers are in its process
    register_families(families)
    commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine = ServedLLM(model, **options)
    try:
        read_vocabulary(engine)
        keep_what_lives()
        serve_many_threads()
        outbox.send(EngineReady(engine.config, engine.model_config))
        threading.Thread(target=_read, args=(link, commands), daemon=True).start()
        EngineLoop(engine, answers_of(engine), commands, outbox).run()
    finally:
        engine.close()


def answers_of(llm: "LLM") -> dict[Question, Callable[..., Any]]:
    """The function to call for each question."""
    return {
        "stats": llm.stats,
        "get_metrics": llm.get_metrics,
        "check_adapter": llm.check_adapter,
        "reset_prefix_cache": llm.reset_prefix_cache,
        "begin_update": llm.begin_update,
        "load_weights": llm.load_weights,
        "end_update": llm.end_update,
        "cancel_update": llm.cancel_update,
        "reload_weights": llm.reload_weights,
        "get_weights": llm.get_weights,
        "apply_model": llm.apply_model,
        "sleep": llm.sleep,
        "wake_up": llm.wake_up,
        "is_sleeping": lambda: llm.is_sleeping,
        "start_profile": llm.start_profile,
        "stop_profile": llm.stop_profile,
    }


def read_vocabulary(engine: "LLMEngine") -> None:
    """Make llguidance read the vocabulary now: it holds the GIL, which would stop later steps."""
    if not has_room("structured"):
        return
    constrained = SamplingParams(structured_outputs=StructuredOutputs(regex="a"))
    with contextlib.suppress(ValueError):  # without a tokenizer a constraint is refused
        engine.intake.accept([0], constrained)


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
    with contextlib.suppress(OSError):
        outbox.send(EngineFailed(error, details))
        outbox.wait(REPORT_SECONDS)
