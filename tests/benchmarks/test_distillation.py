"""The comparison of ways to distil: ratios of equal seeds, with Student's interval."""

import io

from rich.console import Console

from benchmarks import distillation


def record(arm: str, seed: int, tokens: int) -> dict:
    of = [
        {"task": task, "temperature": t, "tokens": tokens, "calls": 1000}
        for task in distillation.TASKS
        for t in (0.0, 1.0)
    ]
    return {"arm": arm, "seed": seed, "acceptance": of}


def test_a_gain_has_an_interval() -> None:
    """Ratios 1.02, 1.04, 1.06: mean 1.04, and 4.303 times 0.02 over the root of 3 is 0.0497."""
    given = zip((1, 2, 3), (2000, 3000, 4000), (2040, 3120, 4240), strict=True)
    records = [
        record(arm, seed, tokens)
        for seed, first, other in given
        for arm, tokens in (("both_target", first), ("kl_own", other))
    ]
    console = Console(file=io.StringIO(), width=160)
    distillation.show(records, console)
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert lines[1].split()[5:] == ["3.000"] * 4
    assert "3.133 (+4.0 ± 5.0%)" in next(line for line in lines if "KL, draft" in line)
