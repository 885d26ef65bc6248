"""The version of the distribution; setup reads it from here without importing the package."""

from __future__ import annotations

__version__ = "0.3.0"
