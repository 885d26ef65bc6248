"""PyTorch's module and optimizer databases on the device, compared with the CPU."""
