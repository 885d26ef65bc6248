"""Programs of the device, compiled by the real TPU compiler without a chip."""
