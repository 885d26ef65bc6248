"""Lowerings by family; importing a module registers its ops."""
