"""From ATen calls to StableHLO: builder, registry of lowerings, views, decompositions."""
