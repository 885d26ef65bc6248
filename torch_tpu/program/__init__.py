"""Programs: from a described ATen call to StableHLO text and a plan."""
