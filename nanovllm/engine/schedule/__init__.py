"""Who runs: sequences, batches, the scheduler and its forecast. No tensors here."""
