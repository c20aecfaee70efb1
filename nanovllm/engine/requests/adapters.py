"""RequestAdapters: what an engine asks about the adapters of requests. The base class has none."""

from typing import Any

from nanovllm.engine.errors import NotReadyError
from nanovllm.engine.requests.intake import Accepted
from nanovllm.engine.schedule.admission import Admissions
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request


class RequestAdapters:
    """The adapters of an engine without any: a request that names one is refused."""

    admissions: Admissions | None = None  # None: every sequence may run

    def adapted(
        self,
        accepted: Accepted,
        lora_request: LoRARequest | None,
        known: dict[LoRARequest, Any] | None = None,
    ) -> Accepted:
        """A prompt with the adapter that it is computed with, which is read and checked.

        `known` has the adapters of the call's prompts so far: files of each are read once.
        """
        if (asked := check_lora_request(lora_request)) is not None:
            self.check(asked)
        del known
        return accepted

    def check(self, lora_request: LoRARequest) -> None:  # noqa: ARG002
        """Read an adapter for requests to come; raises if it does not fit the model."""
        raise ValueError(NOT_ENABLED)

    def named(self, name: str | None) -> LoRARequest | None:  # noqa: ARG002
        """The adapter of `lora_modules` with this name, if there is one."""
        return None

    def failures(self) -> dict[int, Exception]:
        """Requests that wait for adapters that cannot be read, by id, and why."""
        return {}

    def wait(self) -> None:
        """Wait a little while adapters are read: nothing else is to be done."""

    def reset(self) -> None:
        """Mark all slots as empty. For use after an interrupt; nothing runs."""

    def refuse(self, reason: NotReadyError | None) -> None:
        """Read no adapters for this reason; with None, go on."""

    def close(self) -> None:
        """Read no more, and drop what is in the host's memory."""
