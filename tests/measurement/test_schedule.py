"""The time of programs written by hand, against arithmetic by hand.

The chip reads 1,000 bytes and has 100 cycles a second; arrays lie in HBM unless S says otherwise.
"""

import pytest

from speculative.measurement.chips import Chip
from speculative.measurement.hlo import HloModule, Shape
from speculative.measurement.schedule import Cost, Schedule

CHIP = Chip("", "", "", 10**9, 1000.0, 1e6, 100.0, 50.0, {4: (2, 2)})
KERNEL = "f32[100]{0}"  # 400 bytes.
NEAR = "f32[100]{0:T(128)S(3)}"  # On the chip; 512 bytes with its padding.


def estimate(cycles: int) -> str:
    return f'backend_config={{"window_config":{{"estimated_cycles":"{cycles}"}}}}'


def fusion(name: str, shape: str, operands: str, called: str, cycles: int, scope: str = "") -> str:
    metadata = f'metadata={{op_name="{scope}"}}, ' if scope else ""
    return (
        f"  %{name} = {shape} fusion({operands}), kind=kLoop, calls=%{called}, {metadata}"
        f"{estimate(cycles)}"
    )


def program(*entry: str, others: str = "") -> HloModule:
    """A program with a computation `add` of two kernels, and one entry."""
    text = f"""HloModule jit_f, is_scheduled=true

%add (x.1: f32[100], y.1: f32[100]) -> f32[100] {{
  %x.1 = {KERNEL} parameter(0)
  %y.1 = {KERNEL} parameter(1)
  ROOT %sum = {KERNEL} add(%x.1, %y.1)
}}
{others}
ENTRY %main (a: f32[100], b: f32[100]) -> f32[100] {{
  %a = {KERNEL} parameter(0)
  %b = {KERNEL} parameter(1)
"""
    return HloModule(text + "\n".join(entry) + "\n}\n")


def cost(found: HloModule, scope: str = "") -> Cost:
    return Schedule(found, CHIP, scope).cost(found.entry)


@pytest.mark.parametrize(("cycles", "seconds"), [(50, 1.2), (120, 1.2), (300, 3.0)])
def test_an_instruction_takes_the_larger_of_its_cycles_and_its_bytes(
    cycles: int, seconds: float
) -> None:
    # It reads two kernels and writes one: 1,200 bytes.
    found = cost(program(fusion("c", KERNEL, "%a, %b", "add", cycles)))
    assert found.bytes == 1200
    assert found.seconds == pytest.approx(seconds)


def test_a_copy_in_the_background_takes_what_bandwidth_is_left() -> None:
    start = f"  %s = ({NEAR}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%a)"
    done = f"  %d = {NEAR} copy-done(%s)"
    # It reads 800 of the 1,000 bytes that go by in its second; half of the copy's 400 are left.
    near = fusion("c", NEAR, "%b, %b", "add", 100)
    assert cost(program(start, near, done)).seconds == pytest.approx(1.2)
    # Here the copy's 400 fit.
    near = fusion("c", NEAR, "%b", "add", 100)
    assert cost(program(start, near, done)).seconds == pytest.approx(1.0)
    # A fifth of a second leaves no room: 400 bytes of its own in 0.4 s, then 400 of the copy.
    near = fusion("c", NEAR, "%b", "add", 20)
    found = cost(program(start, near, done))
    assert (found.seconds, found.bytes) == (pytest.approx(0.8), 800)


def test_copies_are_awaited_in_the_order_of_their_start() -> None:
    lines = [
        f"  %s1 = ({NEAR}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%a)",
        f"  %s2 = ({NEAR}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%b)",
        f"  %d2 = {NEAR} copy-done(%s2)",
        fusion("c", NEAR, "%d2", "add", 100),
        f"  %d1 = {NEAR} copy-done(%s1)",
    ]
    assert cost(program(*lines)).seconds == pytest.approx(0.8 + 1.0)


LOOP = f"""
%body (t: (s32[], f32[100])) -> (s32[], f32[100]) {{
  %t = (s32[], {KERNEL}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %k = {KERNEL} get-tuple-element(%t), index=1
{fusion("n", KERNEL, "%k, %k", "add", 200, "jit(f)/propose/while/body")}
  ROOT %o = (s32[], {KERNEL}) tuple(%i, %n)
}}

%fixed (u: (s32[], f32[100])) -> pred[] {{
  %u = (s32[], {KERNEL}) parameter(0)
  %j = s32[] get-tuple-element(%u), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%j, %six), direction=LT
}}

%open (v: (s32[], f32[100])) -> pred[] {{
  %v = (s32[], {KERNEL}) parameter(0)
  %w = s32[] get-tuple-element(%v), index=0
  %x = s32[] get-tuple-element(%v), index=0
  ROOT %goes = pred[] compare(%w, %x), direction=LT
}}
"""


def test_a_loop_takes_its_trips_and_one_that_depends_on_data_a_single_one() -> None:
    start = f"  %z = (s32[], {KERNEL}) tuple(%a, %b)"
    shape = f"(s32[], {KERNEL})"
    for condition, trips in (("fixed", 6), ("open", None)):
        loop = f"  %l = {shape} while(%z), condition=%{condition}, body=%body"
        found = program(start, loop, others=LOOP)
        (one,) = [x for x in found.instructions.values() if x.opcode == "while"]
        assert found.trips(one) == trips
        assert [x.name for x in found.loops()] == ([] if trips else ["l"])
        total = cost(found, "propose")
        assert total.seconds == pytest.approx(2.0 * (trips or 1))
        assert total.named == pytest.approx(total.seconds)
        assert total.bytes == (trips or 1) * 1200


def test_a_loop_over_the_parts_of_a_prompt_is_no_decoding_loop() -> None:
    """It takes the given trips; other loops in the program keep theirs."""
    start = f"  %z = (s32[], {KERNEL}) tuple(%a, %b)"
    shape, called = f"(s32[], {KERNEL})", "condition=%open, body=%body"
    scope = 'metadata={op_name="jit(f)/read_prompt/while"}'
    first = f"  %l = {shape} while(%z), {called}, {scope}"
    second = f'  %m = {shape} while(%z), {called}, metadata={{op_name="jit(f)/while"}}'
    found = program(start, first, second, others=LOOP)
    schedule = Schedule(found, CHIP, trips={"read_prompt": 5})
    assert [x.name for x in schedule.loops()] == ["m"]
    assert schedule.cost(found.entry).seconds == pytest.approx(2.0 * (5 + 1))


def test_a_scope_has_its_own_instructions_and_what_they_wait_for() -> None:
    lines = [
        fusion("c", NEAR, "%b", "add", 100, "jit(f)/propose/add"),
        f"  %s = ({NEAR}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%a)",
        f"  %d = {NEAR} copy-done(%s)",
        fusion("e", NEAR, "%d", "add", 50, "jit(f)/target/add"),
    ]
    assert cost(program(*lines), "propose").named == pytest.approx(1.0)
    assert cost(program(*lines), "target").named == pytest.approx(0.5 + 0.4)


SLICES = """
%look (e.1: f32[1000,128], i.1: s32[]) -> f32[1,128] {
  %e.1 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %i.1 = s32[] parameter(1)
  ROOT %row = f32[1,128]{1,0:T(1,128)} dynamic-slice(%e.1, %i.1), dynamic_slice_sizes={1,128}
}

%put (e.2: f32[1000,128], r.2: f32[1,128], i.2: s32[]) -> f32[1000,128] {
  %e.2 = f32[1000,128]{1,0:T(8,128)} parameter(0)
  %r.2 = f32[1,128]{1,0:T(1,128)} parameter(1)
  %i.2 = s32[] parameter(2)
  ROOT %new = f32[1000,128]{1,0:T(8,128)} dynamic-update-slice(%e.2, %r.2, %i.2)
}

%shape (k.3: f32[100]) -> f32[10,10] {
  %k.3 = f32[100]{0} parameter(0)
  ROOT %b.3 = f32[10,10]{1,0} bitcast(%k.3)
}

%deep (k.4: f32[100]) -> f32[10,10] {
  %k.4 = f32[100]{0} parameter(0)
  %b.4 = f32[10,10]{1,0} fusion(%k.4), kind=kLoop, calls=%shape
  ROOT %d.4 = f32[10,10]{1,0:S(3)} negate(%b.4)
}
"""


def test_of_what_is_sliced_the_slice_counts() -> None:
    table = "  %e = f32[1000,128]{1,0:T(8,128)} parameter(2)"
    row = fusion("r", "f32[1,128]{1,0:T(1,128)S(3)}", "%e, %a", "look", 1)
    put = fusion("p", "f32[1000,128]{1,0:T(8,128)}", "%e, %r, %a", "put", 1)
    found = program(table, row, put, others=SLICES)
    # The row of 128 numbers, read, and the index, a whole kernel here.
    assert found.traffic(found.instructions["r"]) == 512 + 400
    # The row lies on the chip; it is written where it belongs.
    assert found.traffic(found.instructions["p"]) == 512 + 400
    inner = program(fusion("q", "f32[10,10]{1,0:S(3)}", "%a", "deep", 1), others=SLICES)
    assert inner.traffic(inner.instructions["q"]) == 400


def test_arrays_are_padded_to_tiles() -> None:
    assert Shape("bf16", (64, 144, 64), (2, 0, 1), (8, 128)).bytes == 144 * 64 * 128 * 2
    assert Shape("bf16", (64, 144, 64), (2, 1, 0)).bytes == 64 * 144 * 64 * 2
    assert Shape("pred", (10,), (0,)).bytes == 10
    assert Shape("s4", (10,), (0,)).bytes == 5
    assert Shape("f32", (), ()).bytes == 4


def test_copies_of_kernels_are_found_in_loops_and_outside() -> None:
    moving = LOOP.replace(
        fusion("n", KERNEL, "%k, %k", "add", 200, "jit(f)/propose/while/body"),
        f"  %n = {KERNEL} copy(%k), {estimate(200)}",
    )
    lines = [
        f"  %s = ({NEAR}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%a)",  # A prefetch.
        f"  %d = {NEAR} copy-done(%s)",
        f"  %h = ({KERNEL}, {KERNEL}, u32[]{{:S(2)}}) copy-start(%a)",
        f"  %g = {KERNEL} copy-done(%h)",
        f"  %near = {NEAR} copy(%d)",  # From one place on the chip to another.
        f"  %y = {KERNEL} transpose(%b), dimensions={{0}}",
        f"  %z = (s32[], {KERNEL}) tuple(%a, %b)",
        f"  %l = (s32[], {KERNEL}) while(%z), condition=%open, body=%body",
    ]
    schedule = Schedule(program(*lines, others=moving), CHIP)
    assert schedule.copies({("f32", 100)}) == (["n"], ["h", "y"])
    assert schedule.copies({("bf16", 100), ("f32", 99)}) == ([], [])


def test_a_text_that_is_no_program() -> None:
    with pytest.raises(ValueError, match="no ENTRY"):
        HloModule("HloModule nothing\n")


MET = "channel_id=1, replica_groups={groups}, to_apply=%sum, backend_config={{}}"
RING = 4e-6 + 2 * 400 * 0.75 / (2 * 50)  # Two axes of two chips: a hop each, there and back.


@pytest.mark.parametrize(
    ("groups", "chips", "seconds"),
    [
        ("{{0,1,2,3}}", 4, RING),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4, RING),
        ("[2,4]<=[8]", 4, RING),
        # Of no slice that is known: a ring of three.
        ("{{0,1,2},{3,4,5}}", 3, 4e-6 + 2 * 400 * (2 / 3) / (2 * 50)),
    ],
)
def test_what_chips_exchange_takes_hops_and_the_links_time(
    groups: str, chips: int, seconds: float
) -> None:
    made = program(
        f"  %a = {KERNEL} parameter(0)",
        f"  ROOT %b = {KERNEL} all-reduce(%a), {MET.format(groups=groups)}",
    )
    one = made.instructions["b"]
    assert made.exchanged(one) == ("all-reduce", 400, chips)
    assert made.exchanged(made.instructions["a"]) is None
    found = Schedule(made, CHIP).cost(made.entry)
    assert found.seconds == pytest.approx(seconds)
    assert (found.exchanging, found.collectives, found.exchanged) == (
        pytest.approx(seconds), 1, 400,
    )  # fmt: skip


def test_what_is_exchanged_in_the_background_hides_behind_work() -> None:
    """A permutation takes 8 s on its link; 3 s of work are done meanwhile."""
    made = program(
        f"  %a = {KERNEL} parameter(0)",
        f"  %s = ({KERNEL}, {KERNEL}) collective-permute-start(%a), "
        "source_target_pairs={{0,1}}",
        fusion("w", NEAR, "%a", "add", 300),
        f"  ROOT %d = {KERNEL} collective-permute-done(%s)",
    )
    found = Schedule(made, CHIP).cost(made.entry)
    assert found.seconds == pytest.approx(1e-6 + 8)
    assert found.exchanging == pytest.approx(1e-6 + 8)
    assert found.collectives == 1


def test_a_step_is_no_faster_than_its_bytes_where_chips_exchange_little() -> None:
    made = program(
        f"  %a = {KERNEL} parameter(0)",
        f"  %r = f32[1]{{0}} all-reduce(%a), {MET.format(groups='{{0,1,2,3}}')}",
        fusion("w", NEAR, "%a", "add", 1),
        f"  ROOT %d = {KERNEL} copy(%w)",
    )
    found = Schedule(made, CHIP).cost(made.entry)
    assert found.seconds >= found.bytes / CHIP.bandwidth


def test_a_sum_of_which_a_fusion_keeps_a_part_is_a_reduce_scatter() -> None:
    """Half of an all-reduce; a fusion that sums nothing over chips exchanges nothing."""
    scattered = f"""
%scatter (i: f32[100]) -> f32[25] {{
  %i = {KERNEL} parameter(0)
  %zero = s32[] constant(0)
  %r = {KERNEL} all-reduce(%i), {MET.format(groups="{{0,1,2,3}}")}
  ROOT %part = f32[25]{{0}} dynamic-slice(%r, %zero), dynamic_slice_sizes={{25}}
}}
"""
    lines = (
        f"  %s = f32[25]{{0}} fusion(%a), kind=kCustom, calls=%scatter, {estimate(1)}",
        fusion("w", NEAR, "%a, %b", "add", 300),
        "  ROOT %d = f32[25]{0} copy(%s)",
    )
    made = program(*lines, others=scattered)
    assert made.exchanged(made.instructions["s"]) == ("reduce-scatter", 400, 4)
    assert made.exchanged(made.instructions["w"]) is None
    found = Schedule(made, CHIP).cost(made.entry)
    assert found.exchanging == pytest.approx(RING / 2)
    assert (found.collectives, found.exchanged) == (1, 400)
