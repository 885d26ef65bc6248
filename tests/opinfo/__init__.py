"""PyTorch's OpInfo database on the device, compared with the CPU."""
