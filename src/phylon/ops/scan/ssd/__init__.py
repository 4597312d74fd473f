"""Mamba-2's scan with a scalar ``A`` for each head, in matrix products over chunks: in PyTorch and in C++."""
