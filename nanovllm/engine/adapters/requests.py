"""AdapterRequests: the calls of an engine that take a `LoRARequest`, or return one."""

from dataclasses import replace

from nanovllm.engine.adapters.adapter import Adapter
from nanovllm.engine.adapters.calls import AdapterCalls
from nanovllm.engine.requests.intake import Accepted
from nanovllm.engine.sequence import Sequence
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request


class AdapterRequests:
    """A part of `LLMEngine`; `adapters` is None without `enable_lora`."""

    adapters: AdapterCalls | None

    def adapted(self, accepted: Accepted, lora_request: LoRARequest | None) -> Accepted:
        """A prompt with the adapter that it is computed with, which is read and checked."""
        if (asked := check_lora_request(lora_request)) is None:
            return accepted
        return replace(accepted, adapter=self._adapter_of(asked))

    def named_adapter(self, name: str | None) -> LoRARequest | None:
        """The adapter of `lora_modules` with this name, if there is one."""
        return self.adapters.named.get(name or "") if self.adapters is not None else None

    def check_adapter(self, lora_request: LoRARequest) -> None:
        """Read an adapter for requests to come; raises if it does not fit the model."""
        self._adapter_of(lora_request)

    def _adapter_of(self, lora_request: LoRARequest) -> Adapter:
        """The adapter, read and checked unless it has been."""
        if self.adapters is None:
            raise ValueError(NOT_ENABLED)
        return self.adapters.store.accept(lora_request)


def check_had_adapter(seq: Sequence) -> None:
    """Raise if a sequence has ended because its adapter could not be read again."""
    if seq.finish_reason == "error":
        raise ValueError(f"lora_request: {seq.stop_reason}")
