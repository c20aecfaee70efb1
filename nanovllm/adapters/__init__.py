"""Adapters: low-rank additions to a model's layers.

adapter.py         an adapter that requests use, and what says that its files have changed
peft.py            reads adapters' files; peft_config.py their config, tensors.py their matrices
store.py           the adapters in the host's memory, read by threads during the steps
slot_table.py      which adapter is in each slot, and which one gets a slot next
slot_memory.py     the slots' memory in a rank's layers; parts.py fills it, and is part of each step
modules.py         the layers that can have adapters, by their names in adapters' files
base_weights.py    weights of the base model that an adapter's files contain
place_command.py   the command that fills a slot on every rank
engine_adapters.py what the engine asks of all this
"""
