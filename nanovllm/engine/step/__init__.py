"""A step: from a batch to host arrays, to the device, and back to token ids."""
