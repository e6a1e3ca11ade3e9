"""A row of a table: its settings, its texts, the models behind it, its measurement, its record."""
