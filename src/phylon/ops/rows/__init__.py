"""Kernels over rows, in C++, that several ops share: norms, activations, rotation, scores' loss, AdamW."""
