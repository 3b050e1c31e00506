"""Routing by itself: rows, shapes, refusals, addresses, what is written and what is left behind."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch

from hf_multilora import RoutingError
from hf_multilora.pool import BASE, FREE, Layout, RowTables
from hf_multilora.routing import Request, Routing

SPANS = {0: (0, 3), 2: (3, 2)}  # slot 0 owns rank rows 0..2, slot 2 owns 3..4
WIDTH, SLOTS = 6, 4


class CountedLayout(Layout):
    """A layout that counts its writes, and can fail at one."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 16, SLOTS, torch.device("cpu"))
        self.take(SPANS)
        self.writes = 0
        self.fails: type[BaseException] | None = None

    def write(self, table: RowTables, present: frozenset[int], keep: bool = False) -> None:
        self.writes += 1
        if self.fails is not None:
            raise self.fails
        super().write(table, present, keep)

    @property
    def rows(self) -> RowTables:
        assert self.table is not None
        return self.table


@pytest.fixture
def layout() -> CountedLayout:
    return CountedLayout()


@pytest.fixture
def routing(layout: CountedLayout) -> Iterator[Routing]:
    routing = Routing(SLOTS)
    routing.relayout([layout])
    yield routing
    assert not routing.open and not routing.active and routing.uniform is None and routing.rows == 0


def rows_of(slots: tuple[int, ...]) -> RowTables:
    table = RowTables(len(slots), SLOTS, torch.device("cpu"))
    table.row_slots.copy_(torch.tensor(slots))
    return table


def opened(layout: Layout) -> list[list[int]]:
    """Per row, the rank rows that are open to it."""
    return [(~row).nonzero().flatten().tolist() for row in layout.closed]


def test_a_layout_opens_to_each_row_its_own_rank_rows_only(layout: CountedLayout) -> None:
    assert layout.owner.tolist() == [0, 0, 0, 2, 2, FREE]
    assert layout.starts.tolist() == [[0, 0, 3, 0]] and layout.ranks.tolist() == [[3, 0, 2, 0]]
    layout.write(rows_of((2, BASE, 0, 1)), frozenset({0, 1, 2}))
    assert layout.live and opened(layout) == [[3, 4], [], [0, 1, 2], []]
    layout.write(rows_of((BASE, 1)), frozenset({1}))
    assert opened(layout) == [[], []] and not layout.live, "slot 1 has no rank rows in these modules"


# -- rows ------------------------------------------------------------------------------------------------------------
def test_rows_are_grouped_by_slot_with_the_base_last(routing: Routing, layout: CountedLayout) -> None:
    routing.push(Request((2, BASE, 0, 2, 0)))
    assert layout.rows.order.tolist() == [2, 4, 0, 3, 1] and layout.rows.order.dtype == torch.int32
    assert layout.rows.offsets.tolist() == [0, 2, 2, 4, 4] and layout.rows.offsets.dtype == torch.int32
    assert routing.active and routing.uniform is None
    assert opened(layout) == [[3, 4], [], [0, 1, 2], [3, 4], [0, 1, 2]]
    routing.pop()


@pytest.mark.parametrize("factor", [1, 2, 3])
def test_an_entry_point_may_repeat_rows_by_a_known_factor(routing: Routing, layout: CountedLayout, factor: int) -> None:
    routing.push(Request((2, 0), factors={1, factor}))
    routing.enter(2 * factor, 5)
    assert (routing.rows, routing.tokens) == (2 * factor, 5)
    assert opened(layout) == [[3, 4]] * factor + [[0, 1, 2]] * factor
    routing.pop()


@pytest.mark.parametrize("rows", [0, 1, 3, 4, 5, 8])
def test_other_row_counts_are_refused_and_change_nothing(routing: Routing, layout: CountedLayout, rows: int) -> None:
    """4 and 8 rows are divisible by 2: without a factor known for this call that says nothing."""
    routing.push(Request((2, 0)))
    before = opened(layout)
    with pytest.raises(RoutingError, match=rf"the 2 rows of its adapter_names.*the encoder got {rows} rows"):
        routing.enter(rows, 5, where="the encoder")
    assert opened(layout) == before and routing.rows == 2
    routing.pop()


@pytest.mark.parametrize(
    ("slots", "active", "uniform"),
    [((1, 1), True, 1), ((BASE, BASE), False, None), ((1, BASE), True, None), ((1, 2), True, None)],
)
def test_what_is_known_of_the_mix(routing: Routing, slots: tuple[int, ...], active: bool, uniform: int | None) -> None:
    routing.push(Request(slots))
    assert (routing.active, routing.uniform) == (active, uniform)
    routing.pop()


def test_packed_rows_are_routed_by_token(routing: Routing, layout: CountedLayout) -> None:
    routing.push(Request((0, 0, 2), ragged=True))
    routing.enter(1, 3)
    assert routing.ragged and routing.rows == 3 and opened(layout) == [[0, 1, 2], [0, 1, 2], [3, 4]]
    assert not layout.kept and not routing.tables, "packed rows have any number of tokens"
    for rows, tokens in ((1, 4), (2, 3), (1, None)):
        with pytest.raises(RoutingError, match=rf"must hold 3 tokens, the model got {rows} x {tokens}"):
            routing.enter(rows, tokens)
    routing.pop()
    assert not routing.ragged


# -- align -----------------------------------------------------------------------------------------------------------
# rows, tokens, shape, align's arguments -> shape with rows in front, None: refused
ALIGNED = [
    (2, 3, (2, 3, 8), {}, (2, 3, 8)),
    (2, 3, (2, 1, 8), {}, (2, 1, 8)),  # lm_head with logits_to_keep, or another stream's tokens
    (2, 3, (2, 8), {}, (2, 1, 8)),  # pooled
    (2, 3, (2, 4, 5, 8), {}, (2, 20, 8)),
    (2, 3, (6, 8), {}, None),  # divisible by 2: may be tokens of a router, or of another order
    (2, 3, (1, 3, 8), {}, None),
    (2, 3, (3, 2, 8), {}, None),
    (2, 3, (4, 3, 8), {}, None),
    (2, 3, (6, 8), {"flat": True}, (2, 3, 8)),
    (2, 1, (2, 8), {"flat": True}, (2, 1, 8)),
    (2, None, (2, 8), {"flat": True}, (2, 1, 8)),
    (2, 3, (2, 8), {"flat": True}, None),
    (2, 3, (4, 8), {"flat": True}, None),
    (2, 3, (2, 3), {"trailing": 0}, (2, 3)),
    (2, 3, (1, 3), {"trailing": 0}, None),
    (2, 3, (3,), {"trailing": 0}, None),
    (2, 3, (2,), {"trailing": 0}, (2, 1)),
    (2, 2, (2,), {"trailing": 0}, None),  # one id per row, or one per token and the same for all rows: cannot be told
    (2, 3, (), {"trailing": 0}, None),
]


@pytest.mark.parametrize(("rows", "tokens", "shape", "how", "result"), ALIGNED)
def test_align(
    routing: Routing,
    rows: int,
    tokens: int | None,
    shape: tuple[int, ...],
    how: dict[str, int],
    result: tuple[int, ...],
) -> None:
    x = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    routing.push(Request((0, 2)[:rows]))
    try:
        routing.enter(rows, tokens)
        if result is None:
            with pytest.raises(RoutingError, match=r"layers\.0\.fc: the first dimension.*2 rows.*cannot be attributed"):
                routing.align(x, rows, "layers.0.fc", **how)
        else:
            aligned = routing.align(x, rows, "layers.0.fc", **how)
            assert aligned.shape == result and torch.equal(aligned.flatten(), x.flatten())
    finally:
        routing.pop()


@pytest.mark.parametrize(("shape", "fits"), [((1, 3, 8), True), ((3, 8), True), ((1, 2, 8), False), ((3, 1, 8), False)])
def test_align_packed_rows(routing: Routing, shape: tuple[int, ...], fits: bool) -> None:
    routing.push(Request((0, 0, 2), ragged=True))
    try:
        routing.enter(1, 3)
        if fits:
            assert routing.align(torch.zeros(shape), 3, "fc").shape == (3, 1, 8)
        else:
            with pytest.raises(RoutingError, match="fc: "):
                routing.align(torch.zeros(shape), 3, "fc")
    finally:
        routing.pop()


# -- written once ----------------------------------------------------------------------------------------------------
def test_nothing_is_written_while_rows_and_slots_stay(routing: Routing, layout: CountedLayout) -> None:
    routing.push(Request((2, 0)))
    routing.enter(2, 7)
    for _ in range(5):
        routing.enter(2, 1)
    routing.pop()
    routing.push(Request((2, 0)))
    routing.pop()
    assert layout.writes == 1
    routing.push(Request((0, 2)))
    routing.pop()
    assert layout.writes == 2


def test_addresses_stay_while_the_number_of_rows_stays(routing: Routing, layout: CountedLayout) -> None:
    def addresses() -> list[int]:
        return [
            t.data_ptr() for t in (layout.rows.order, layout.rows.offsets, layout.closed, layout.starts, layout.ranks)
        ]

    def of(slots: tuple[int, ...]) -> list[int]:
        routing.push(Request(slots))
        found = addresses()
        routing.pop()
        return found

    seen = [of(slots) for slots in ((2, 0, BASE), (0, 0, 0), (BASE, 2, 2), (BASE, BASE, BASE))]
    assert seen == [seen[0]] * 4
    other = of((2, 0))
    assert other[0] != seen[0][0] and layout.closed.shape[0] == 2, "control: other rows, other tensors"
    assert of((0, BASE, 2)) == seen[0], "a graph captured with three rows finds its tables again"
    layout.take({1: (2, 3)})
    assert of((1, BASE, 2))[:2] == seen[0][:2] and [t.data_ptr() for t in (layout.starts, layout.ranks)] == seen[0][3:]
    assert layout.owner.tolist() == [FREE, FREE, 1, 1, 1, FREE] and layout.ranks.tolist() == [[0, 3, 0, 0]]


def test_a_new_layout_gets_the_rows_in_force(routing: Routing) -> None:
    routing.push(Request((2, 0)))
    new = CountedLayout()
    routing.relayout([new])
    assert new.writes == 1 and opened(new) == [[3, 4], [0, 1, 2]]
    routing.pop()
    late = CountedLayout()
    routing.relayout([late])
    assert late.writes == 0
    routing.push(Request((2, 0)))
    assert late.writes == 1, "the same rows as before, but this layout never had them"
    routing.pop()


def test_tensors_made_in_inference_mode_can_be_written_outside(layout: CountedLayout) -> None:
    with torch.inference_mode():
        routing = Routing(SLOTS)
        routing.relayout([layout])
        routing.push(Request((2, 0)))
        routing.pop()
    routing.push(Request((0, 2)))
    assert opened(layout) == [[0, 1, 2], [3, 4]] and not layout.closed.is_inference()
    routing.pop()


# -- nesting, failures, copies ---------------------------------------------------------------------------------------
def test_the_outer_request_is_in_force_again_after_an_inner_one(routing: Routing, layout: CountedLayout) -> None:
    routing.push(Request((2, 0)))
    routing.push(Request((BASE, 0, 0), ragged=True))
    assert opened(layout) == [[], [0, 1, 2], [0, 1, 2]]
    routing.pop()
    assert routing.open and routing.rows == 2 and not routing.ragged and opened(layout) == [[3, 4], [0, 1, 2]]
    routing.pop()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_write_that_fails_leaves_nothing_behind(
    routing: Routing, layout: CountedLayout, error: type[BaseException]
) -> None:
    """Rows written half must not pass for the rows before: the next request with those writes them again."""
    routing.push(Request((2, 0)))
    routing.pop()
    layout.fails = error
    with pytest.raises(error):
        routing.push(Request((0, 2)))
    assert not routing.open and not routing.active and routing.rows == 0
    layout.fails, writes = None, layout.writes
    routing.push(Request((2, 0)))
    assert layout.writes == writes + 1 and layout.rows.order.tolist() == [1, 0]
    routing.pop()


def test_an_inner_request_that_fails_leaves_the_outer_one_in_force(routing: Routing, layout: CountedLayout) -> None:
    routing.push(Request((2, 0)))
    failing = CountedLayout()
    routing.layouts.append(failing)
    routing._written = None
    failing.fails = RuntimeError
    with pytest.raises(RuntimeError):
        routing.push(Request((0, 0, 0)))
    routing.layouts.remove(failing)
    routing.enter(2, 3)
    assert len(routing.stack) == 1 and opened(layout) == [[3, 4], [0, 1, 2]] and routing.uniform is None
    routing.pop()


def test_the_standing_adapter_is_for_calls_without_a_request(routing: Routing) -> None:
    routing.stand(2)
    assert routing.active and routing.uniform == 2 and not routing.open
    routing.push(Request((0, BASE)))
    routing.stand(1)
    assert routing.active and routing.uniform is None, "an open request does not hear of it"
    routing.pop()
    assert routing.uniform == 1
    routing.stand(BASE)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_carry_no_request(routing: Routing, copied: object) -> None:
    routing.stand(2)
    routing.push(Request((0, 0)))
    layouts, routing.layouts = routing.layouts, []
    other = copied(routing)  # type: ignore[operator]
    routing.layouts = layouts
    assert not other.open and other.uniform == 2 and other.rows == 0 and other._written is None
    assert routing.open and routing.uniform == 0
    routing.pop()
    routing.stand(BASE)
