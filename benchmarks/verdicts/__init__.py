"""Audits of other programs' samples, and the adapters that draw them; see `__main__`."""

FALSE_ALARM = 0.001
