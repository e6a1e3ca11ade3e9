"""Other programs that decode T5, each in a process of its own, beside this one.

None of them is needed by anything else; `scripts/compare_peers.py` runs those it finds.
"""
