import itertools
import math
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_rl_engines.sequence import Plan, plan_rows

BUDGET = 32
lengths_of_ranks = st.lists(st.lists(st.integers(1, 24), max_size=12), min_size=1, max_size=4)
property_test = settings(max_examples=60, derandomize=True, deadline=None)


def row_cost(lengths, row, quadratic=0.0, linear=1.0):
    return sum(linear * lengths[rank][index] + quadratic * lengths[rank][index] ** 2 for rank, index in row)


def rank_costs(lengths, plan, quadratic=0.0, linear=1.0):
    return [sum(row_cost(lengths, row, quadratic, linear) for row in rows) for rows in plan.rows]


@property_test
@given(
    lengths_of_ranks,
    st.one_of(st.none(), st.integers(28, 64)),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 3),
    st.booleans(),
    st.sampled_from([0.0, 0.1, 10.0]),
)
def test_the_constraints_hold(lengths, budget, multiple_of, rows_multiple_of, move, quadratic):
    plan = plan_rows(
        lengths,
        budget=budget,
        multiple_of=multiple_of,
        rows_multiple_of=rows_multiple_of,
        move=move,
        quadratic_cost=quadratic,
    )
    every = sorted(document for rows in plan.rows for row in rows for document in row)
    assert every == [(rank, index) for rank, own in enumerate(lengths) for index in range(len(own))]
    assert len(plan.rows) == len(lengths)
    assert {len(rows) for rows in plan.rows} == {plan.rows_per_rank}
    assert plan.rows_per_rank >= 1
    assert plan.rows_per_rank % rows_multiple_of == 0
    if budget is None:
        assert plan.rows_per_rank == rows_multiple_of
    else:
        for row in itertools.chain(*plan.rows):
            assert math.ceil(row_cost(lengths, row) / multiple_of) * multiple_of <= budget
    if not move:
        assert not plan.moves
    # What the engine reads from a plan agrees with its rows.
    for rank in range(len(lengths)):
        documents = plan.documents(rank)
        assert documents == tuple(sorted(documents))
        assert tuple(tuple(documents[i] for i in row) for row in plan.local_rows(rank)) == plan.rows[rank]
        destinations = plan.destinations(rank)
        assert len(destinations) == len(lengths[rank])
        for index, target in enumerate(destinations):
            assert (rank, index) in plan.documents(target)


def fewest_rows(tokens, capacity):
    """The optimum by exhaustion: put each document into each row that has room."""
    best = len(tokens)

    def place(index, rooms):
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(tokens):
            best = len(rooms)
            return
        for row, room in enumerate(rooms):
            if tokens[index] <= room:
                place(index + 1, [*rooms[:row], room - tokens[index], *rooms[row + 1 :]])
        place(index + 1, [*rooms, capacity - tokens[index]])

    place(0, [])
    return best


@property_test
@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=8))
def test_rows_stay_within_the_bound_of_best_fit_decreasing(tokens):
    # Best-fit decreasing needs at most 11/9 of the optimum and 2/3 of a row (Johnson; Dosa for the constant).
    optimum = fewest_rows(sorted(tokens, reverse=True), BUDGET)
    assert plan_rows([tokens], budget=BUDGET).rows_per_rank <= 11 / 9 * optimum + 2 / 3


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("quadratic", [0.0, 0.01])
def test_rows_stay_within_four_thirds_of_the_lower_bound_on_random_lengths(seed, quadratic):
    # The bound: no fewer rows than ceil(tokens / budget), nor than documents longer than half the budget.
    generator = random.Random(seed)
    for ranks, longest in ((1, 1000), (4, 1000), (4, 300)):
        lengths = [[generator.randint(1, longest) for _ in range(60)] for _ in range(ranks)]
        tokens = [n for own in lengths for n in own]
        bound = max(math.ceil(sum(tokens) / 1000), sum(2 * n > 1000 for n in tokens))
        plan = plan_rows(lengths, budget=1000, quadratic_cost=quadratic)
        assert plan.rows_per_rank <= math.ceil(4 / 3 * bound / ranks)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("quadratic", [0.0, 0.001, 1.0])
@pytest.mark.parametrize("budget", [None, 4096])
def test_many_small_documents_are_balanced_within_one_percent(seed, quadratic, budget):
    generator = random.Random(seed)
    lengths = [[generator.randint(10, 300) for _ in range(count)] for count in (200, 10, 0, 90)]
    plan = plan_rows(lengths, budget=budget, quadratic_cost=quadratic)
    costs = rank_costs(lengths, plan, quadratic)
    average = sum(costs) / 4
    assert max(costs) <= 1.01 * average
    # The rows of one index wait for each other: the dearest of each, summed.
    steps = [max(row_cost(lengths, row, quadratic) for row in rows) for rows in zip(*plan.rows, strict=True)]
    assert sum(steps) <= 1.01 * average


def test_long_documents_are_balanced_by_cost_and_not_only_by_tokens():
    # Four documents of 64 tokens cost 64 x as much as four of 8 when attention dominates.
    lengths = [[64] * 4 + [8] * 32, []]
    plan = plan_rows(lengths, budget=512, linear_cost=0.0, quadratic_cost=1.0)
    assert plan.rows_per_rank == 1
    assert [sum(lengths[r][i] == 64 for r, i in rows[0]) for rows in plan.rows] == [2, 2]


def test_full_rows_are_dealt_by_cost():
    # All rows are full, {9, 1} twice and {5, 5} twice, at costs of 82 and 50: each rank must get one of each.
    lengths = [[9, 1, 9, 1], [5, 5, 5, 5]]
    plan = plan_rows(lengths, budget=10, linear_cost=0.0, quadratic_cost=1.0)
    assert plan.rows_per_rank == 2
    assert rank_costs(lengths, plan, 1.0, 0.0) == [132.0, 132.0]


def test_documents_are_swapped_where_a_row_has_no_room_for_another():
    # Before the search: 9 + 8 against 7 + 6 + 3, costs 145 and 94, with room for one token in the second row.
    lengths = [[9, 8, 7, 6, 3], []]
    plan = plan_rows(lengths, budget=17, linear_cost=0.0, quadratic_cost=1.0)
    assert plan.rows_per_rank == 1
    assert sorted(rank_costs(lengths, plan, 1.0, 0.0)) == [64.0 + 36 + 9, 81.0 + 49]


def test_without_moving_each_rank_packs_its_own_and_fewer_rows_are_filled_up():
    lengths = [[10, 10, 10, 10, 10], [1, 1, 1, 1, 1], []]
    plan = plan_rows(lengths, budget=10, move=False)
    assert [len(rows) for rows in plan.rows] == [5, 5, 5]
    assert all(len(row) == 1 for row in plan.rows[0])
    assert all(len(row) == 1 for row in plan.rows[1])
    assert plan.rows[2] == ((),) * 5


def test_five_long_and_five_short_documents_need_the_same_number_of_rows_on_both_ranks():
    plan = plan_rows([[100] * 5, [3] * 5], budget=100, move=False)
    assert [len(rows) for rows in plan.rows] == [5, 5]
    plan = plan_rows([[100] * 5, [3] * 5], budget=100)
    assert [len(rows) for rows in plan.rows] == [3, 3]


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("budget", [None, 16])
def test_no_documents_make_dummy_rows(move, budget):
    plan = plan_rows([[], []], budget=budget, rows_multiple_of=2, move=move)
    assert plan == Plan((((), ()), ((), ())))
    assert plan.destinations(1) == ()


@property_test
@given(lengths_of_ranks, st.booleans())
def test_equal_arguments_give_equal_plans_whatever_the_sequence_type(lengths, move):
    plan = plan_rows(lengths, budget=BUDGET, move=move, quadratic_cost=0.1)
    again = plan_rows(tuple(tuple(own) for own in lengths), budget=BUDGET, move=move, quadratic_cost=0.1)
    assert plan == again


@property_test
@given(lengths_of_ranks, st.randoms(use_true_random=False))
def test_the_lengths_of_the_rows_do_not_depend_on_who_holds_a_document(lengths, generator):
    shuffled = [n for own in lengths for n in own]
    generator.shuffle(shuffled)
    other = [shuffled, *([] for _ in lengths[1:])]
    plans = [plan_rows(where, budget=BUDGET, quadratic_cost=0.1) for where in (lengths, other)]
    shapes = [
        [[sorted(where[rank][index] for rank, index in row) for row in rows] for rows in plan.rows]
        for where, plan in zip((lengths, other), plans, strict=True)
    ]
    assert plans[0].rows_per_rank == plans[1].rows_per_rank
    assert sorted(map(sorted, shapes[0])) == sorted(map(sorted, shapes[1]))


@property_test
@given(lengths_of_ranks, st.randoms(use_true_random=False), st.booleans(), st.sampled_from([1, 2]), st.booleans())
def test_documents_of_a_unit_share_a_row(lengths, generator, move, multiple_of, limited):
    # Units of one, two or three documents; without moving they stay within a rank.
    pool = [[(rank, index) for index in range(len(own))] for rank, own in enumerate(lengths)]
    pool = [[document for own in pool for document in own]] if move else pool
    units = [[0] * len(own) for own in lengths]
    names = itertools.count(100)
    for documents in pool:
        generator.shuffle(documents)
        while documents:
            name = next(names)
            for _ in range(min(generator.randint(1, 3), len(documents))):
                rank, index = documents.pop()
                units[rank][index] = name
    budget = 72 + 1 if limited else None  # three documents of the largest length, and one token that no row can use
    plan = plan_rows(
        lengths, budget=budget, multiple_of=multiple_of, move=move, units=units, linear_cost=1.0, quadratic_cost=0.1
    )
    every = sorted(document for rows in plan.rows for row in rows for document in row)
    assert every == [(rank, index) for rank, own in enumerate(lengths) for index in range(len(own))]
    assert {len(rows) for rows in plan.rows} == {plan.rows_per_rank}
    places: dict[int, set] = {}
    for rank, rows in enumerate(plan.rows):
        for number, row in enumerate(rows):
            assert row == tuple(sorted(row))
            assert budget is None or math.ceil(row_cost(lengths, row) / multiple_of) * multiple_of <= budget
            for source, index in row:
                places.setdefault(units[source][index], set()).add((rank, number))
    assert all(len(rows) == 1 for rows in places.values())
    if not move:
        assert not plan.moves


@property_test
@given(lengths_of_ranks, st.booleans())
def test_units_of_one_document_change_nothing(lengths, move):
    names = itertools.count()
    units = [[next(names) for _ in own] for own in lengths]
    arguments = {"budget": BUDGET, "move": move, "quadratic_cost": 0.1}
    assert plan_rows(lengths, units=units, **arguments) == plan_rows(lengths, **arguments)


def test_units_are_balanced_as_wholes_and_keep_rows_apart_where_documents_alone_would_fit():
    # Alone, 6 + 4 and 6 + 4 fill two rows of 10. The pairs 6 + 6 and 4 + 4 need 12.
    assert plan_rows([[6, 6, 4, 4]], budget=12, units=[[0, 0, 1, 1]]).rows == ((((0, 0), (0, 1)), ((0, 2), (0, 3))),)
    pairs = plan_rows([[6, 6, 5, 5], []], budget=12, units=[[0, 1, 0, 1], []])
    assert pairs.rows == ((((0, 0), (0, 2)),), (((0, 1), (0, 3)),))


@pytest.mark.parametrize(
    ("lengths", "arguments", "words"),
    [
        (
            [[5], [4, 17]],
            {"budget": 16},
            ["document 1", "data rank 1", "17 tokens", "per_micro_batch=16", "at least 17"],
        ),
        (
            [[5], [4, 17, 22]],
            {"budget": 19, "multiple_of": 4},
            ["document 1", "data rank 1", "17 tokens", "per_micro_batch=19", "at least 24", "multiple of 4"],
        ),
        ([[5], [4, 0]], {"budget": 16}, ["document 1", "data rank 1", "0 tokens"]),
        ([[1]], {"budget": 3, "multiple_of": 4}, ["per_micro_batch=3", "multiple_of=4"]),
        ([[1]], {"budget": 0}, ["per_micro_batch=0"]),
        ([[1]], {"budget": 4, "multiple_of": 0}, ["multiple_of=0"]),
        ([[1]], {"budget": 4, "rows_multiple_of": 0}, ["rows_multiple_of=0"]),
        ([[1]], {"budget": 4, "linear_cost": -1.0}, ["linear_cost=-1.0"]),
        ([[1]], {"budget": 4, "quadratic_cost": float("nan")}, ["quadratic_cost=nan"]),
        ([], {"budget": 4}, ["lengths=[]"]),
        (
            [[9, 9], [3]],
            {"budget": 17, "units": [[5, 5], [6]]},
            ["unit 5", "18 tokens", "per_micro_batch=17", "at least 18"],
        ),
        ([[9], [4]], {"budget": 17, "units": [[5], [5]], "move": False}, ["unit 5", "data ranks 0 and 1", "move=True"]),
        ([[9, 9], [3]], {"budget": 32, "units": [[5], [6]]}, ["units has [1, 1]", "[2, 1] documents"]),
    ],
)
def test_impossible_plans_are_refused(lengths, arguments, words):
    with pytest.raises(ValueError) as error:
        plan_rows(lengths, **arguments)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("move", [True, False])
@pytest.mark.parametrize("budget", [None, 8192])
def test_four_thousand_documents_are_planned_quickly(move, budget):
    generator = random.Random(0)
    lengths = [[generator.randint(1, 8192) for _ in range(512)] for _ in range(8)]
    # Well under a second on a free core; the suite shares its cores, and a quadratic algorithm takes far longer.
    start = time.process_time()
    plan_rows(lengths, budget=budget, move=move, quadratic_cost=1e-4)
    assert time.process_time() - start < 5.0
