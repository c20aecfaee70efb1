"""Sums of streams of hidden states, with factors of each row."""

import torch


def mix_streams(coefs: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
    """For each row, its matrix of coefs [T, S, S] times its numbers in streams [S, T, hidden]."""
    return torch.bmm(coefs, streams.transpose(0, 1)).transpose(0, 1)
