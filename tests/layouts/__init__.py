"""Sparse and nested tensors on the device, compared with the CPU."""
