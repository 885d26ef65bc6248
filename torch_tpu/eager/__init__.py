"""The eager device: which ATen ops get the boxed kernel, and the ops composed on the host."""
