"""Names that libraries import from the field's other implementation; they live elsewhere here."""
