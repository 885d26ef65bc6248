"""The eager device: which ATen ops get the native boxed kernel, and the ops composed on the host."""
