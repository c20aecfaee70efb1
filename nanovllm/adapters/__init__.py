"""Adapters: low-rank additions to a model's layers.

adapter.py         an adapter that requests use, and what says that its files have changed
peft.py            reads adapters' files; peft_config.py their config, tensors.py their matrices
store.py           the adapters in the host's memory, read by threads during the steps
slot_table.py      which adapter is in each slot, and which one gets a slot next
slots.py           the slots in a rank's layers; parts.py fills them
place_command.py   the command that fills a slot on every rank
engine_adapters.py what the engine asks of all this
requests.py        the engine's own calls that take a `LoRARequest`
"""
