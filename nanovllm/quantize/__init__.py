"""Quantizing a checkpoint with a calibration text, and saving it as compressed-tensors."""
