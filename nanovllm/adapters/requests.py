"""AdapterRequests: the calls of an engine that take a `LoRARequest`, or return one."""

from dataclasses import replace

from nanovllm.adapters.adapter import Adapter
from nanovllm.adapters.engine_adapters import AdapterCalls
from nanovllm.engine.requests.intake import Accepted
from nanovllm.lora_request import NOT_ENABLED, LoRARequest, check_lora_request

Known = dict[LoRARequest, Adapter]


class AdapterRequests:
    """A part of `LLMEngine`; `adapters` is None without `enable_lora`."""

    adapters: AdapterCalls | None

    def adapted(
        self, accepted: Accepted, lora_request: LoRARequest | None, known: Known | None = None
    ) -> Accepted:
        """A prompt with the adapter that it is computed with, which is read and checked.

        `known` are those of the call's prompts so far: the files of each are looked at once.
        """
        if (asked := check_lora_request(lora_request)) is None:
            return accepted
        known = {} if known is None else known
        if asked not in known:
            known[asked] = self._adapter_of(asked)
        return replace(accepted, adapter=known[asked])

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
