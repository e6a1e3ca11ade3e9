"""A row of a table: its settings, texts, models, measurement and record."""
