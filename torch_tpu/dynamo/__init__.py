"""What TorchDynamo is told about the device. Imported only when Dynamo is."""

from __future__ import annotations
