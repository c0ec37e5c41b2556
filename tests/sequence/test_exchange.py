import pytest
import torch
import torch.distributed as dist

from lightning_rl_engines.sequence import Experience, exchange_documents, plan_rows, return_columns
from tests.support import WorkerError, run_workers

COUNTS = {2: (5, 0), 4: (3, 0, 6, 1)}


def build(rank: int, count: int) -> Experience:
    """Documents whose every value tells where they come from; columns of several dtypes and widths."""
    if not count:
        return Experience.from_documents(input_ids=[], response_mask=[])
    generator = torch.Generator().manual_seed(rank)
    lengths = [1 + (3 * index + rank) % 5 for index in range(count)]
    ids = [torch.randint(0, 100, (n,), generator=generator) for n in lengths]
    mask = [torch.rand(n, generator=generator) > 0.5 for n in lengths]
    experience = Experience.from_documents(
        input_ids=ids,
        response_mask=mask,
        small=[torch.randint(0, 100, (n,), generator=generator).to(torch.int16) for n in lengths],
        half=[torch.randn(n, generator=generator).bfloat16() for n in lengths],
        double=[torch.randn(n, generator=generator).double() for n in lengths],
        rewards=torch.randn(count, generator=generator),
        done=[index % 2 == 0 for index in range(count)],
    )
    # NaN and signed zero survive only where bits are copied.
    log_probs = torch.randn(experience.num_tokens, generator=generator)
    log_probs[0], log_probs[-1] = float("nan"), -0.0
    return experience.with_token_columns(log_probs=log_probs)


def assert_bits_equal(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.dtype == right.dtype
    assert torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def round_trip(counts: tuple[int, ...], destinations_of: tuple[tuple[int, ...], ...]) -> int:
    rank, group = dist.get_rank(), dist.group.WORLD
    everyone = [build(source, count) for source, count in enumerate(counts)]
    own, destinations = everyone[rank], destinations_of[rank]
    received, origin = exchange_documents(own, destinations, group)
    expected_origin = tuple(
        (source, index)
        for source in range(len(counts))
        for index in range(counts[source])
        if destinations_of[source][index] == rank
    )
    assert origin == expected_origin
    reference = Experience.cat(
        [everyone[source].select([index]) for source, index in origin] or [everyone[0].select([])]
    )
    assert received.lengths == reference.lengths
    assert received.response_lengths == reference.response_lengths
    assert received.token_columns.keys() == reference.token_columns.keys()
    assert received.document_columns.keys() == reference.document_columns.keys()
    for name in reference.column_names:
        assert_bits_equal(received[name], reference[name])

    results = {"log_probs": received["log_probs"], "ids": received["input_ids"], "half": received["half"]}
    if rank % 2:
        results = dict(reversed(results.items()))
    home = return_columns(
        results,
        origin=origin,
        received_lengths=received.lengths,
        destinations=destinations,
        lengths=own.lengths,
        group=group,
    )
    assert home.keys() == results.keys()
    for name, column in (("log_probs", "log_probs"), ("ids", "input_ids"), ("half", "half")):
        if len(own):
            assert_bits_equal(home[name], own[column])
        else:
            assert home[name].shape == (0,)
    return len(received)


@pytest.mark.parametrize("world_size", [2, 4])
def test_documents_arrive_and_results_return_bit_by_bit(world_size):
    counts = COUNTS[world_size]
    lengths = [build(rank, count).lengths for rank, count in enumerate(counts)]
    plan = plan_rows(lengths, budget=8)
    assert plan.moves
    planned = tuple(plan.destinations(rank) for rank in range(world_size))
    assert run_workers(world_size, round_trip, counts, planned) == [
        len(plan.documents(rank)) for rank in range(world_size)
    ]
    # All to the last rank, in reverse, and nothing at all: ranks that receive or send nothing.
    last = tuple((world_size - 1,) * count for count in counts)
    assert run_workers(world_size, round_trip, counts, last) == [0] * (world_size - 1) + [sum(counts)]
    reverse = tuple(tuple((count - index) % world_size for index in range(count)) for count in counts)
    assert sum(run_workers(world_size, round_trip, counts, reverse)) == sum(counts)
    assert run_workers(world_size, empty_round_trip) == [0] * world_size


def empty_round_trip() -> int:
    empty = Experience.from_documents(input_ids=[], response_mask=[], rewards=[])
    received, origin = exchange_documents(empty, [], dist.group.WORLD)
    assert origin == ()
    home = return_columns(
        {"log_probs": torch.zeros(0)},
        origin=origin,
        received_lengths=(),
        destinations=(),
        lengths=(),
        group=dist.group.WORLD,
    )
    assert home["log_probs"].shape == (0,)
    return len(received)


def test_one_rank_sends_nothing():
    experience = build(0, 3)
    received, origin = exchange_documents(experience, [0, 0, 0], None)
    assert received is experience
    assert origin == ((0, 0), (0, 1), (0, 2))
    columns = {"log_probs": experience["log_probs"]}
    home = return_columns(
        columns,
        origin=origin,
        received_lengths=received.lengths,
        destinations=[0, 0, 0],
        lengths=experience.lengths,
        group=None,
    )
    assert home["log_probs"] is experience["log_probs"]


def bad_exchange(fault: str) -> None:
    rank = dist.get_rank()
    experience = build(rank, 2)
    destinations = [0, 1]
    if rank == 1:
        if fault == "columns":
            experience = experience.drop("half")
        elif fault == "dtype":
            experience = experience.with_document_columns(rewards=torch.zeros(2, dtype=torch.float64))
        elif fault == "range":
            destinations = [0, 2]
        else:
            destinations = [0]
    exchange_documents(experience, destinations, dist.group.WORLD)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("columns", ["rank 1", "rank 0", "half"]),
        ("dtype", ["rank 1", "rank 0", "float64"]),
        ("range", ["rank 1", "document 1", "to 2", "0 to 1"]),
        ("count", ["rank 1", "1 entries", "2 documents"]),
    ],
)
def test_what_one_rank_does_wrong_is_raised_by_all(fault, words):
    with pytest.raises(WorkerError) as error:
        run_workers(2, bad_exchange, fault)
    assert error.value.all_ranks_raised(ValueError)
    for word in words:
        assert word in error.value.errors[0].message


def test_a_result_of_the_wrong_length_is_named():
    with pytest.raises(ValueError, match=r"'log_probs' has shape \[3\].*4 tokens"):
        return_columns(
            {"log_probs": torch.zeros(3)},
            origin=[(0, 0)],
            received_lengths=[4],
            destinations=[0],
            lengths=[4],
            group=None,
        )
