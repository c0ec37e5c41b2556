"""Deal documents out as rows: under the token budget, equally many rows per data rank, the load balanced.

Every rank calls :func:`plan_rows` with the lengths of all ranks and gets the same plan, so there is nothing to agree on
and an error is raised by all ranks together. There are two constraints. Tokens per row are a hard cap. Cost, the
model's own time for a document (``linear * n + quadratic * n^2``), is balanced as well as the cap allows. The rows with
the same index on all data ranks run at the same time and wait for each other in the collectives of the sharded model,
so an update takes the sum over row indices of the dearest row, and it helps to have few rows and equal ones:

1. *Count.* Best-fit decreasing by tokens finds how few rows hold the documents. The count is raised to a multiple of
   ``ranks * rows_multiple_of``.
2. *Fill.* The documents, dearest first, each go to the cheapest of that many rows with room for it. Where this
   dead-ends, which happens only when rows are nearly full, the rows of step 1 are kept and empty ones added.
3. *Even out.* A local search pairs dear rows with cheap ones and moves or swaps documents where that lowers the dearer
   of the two without breaking the cap.
4. *Deal.* Sorted by cost, each run of ``ranks`` rows shares a row index, which makes the sum of the dearest rows the
   smallest possible; it is evened out once more by itself. Within an index the dearest row goes to the rank with the
   least so far.

Documents that may not leave their rank go through steps 1 to 3 rank by rank, for the largest of the ranks' counts.
Documents that must share a row, such as the two of a preference pair, go through all steps as one.
"""

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Row: TypeAlias = tuple[tuple[int, int], ...]
"""Documents of a row as ``(source data rank, index on it)``; an empty row stands for a masked dummy."""

_FILL_ATTEMPTS = 32  # rows looked at for one document before best-fit decreasing is kept instead
_EVEN_SWEEPS = 64
_FRUITLESS_SWEEPS = 4  # in a row, each with other pairs, before the search ends
_EXCHANGES_PER_PAIR = 16


@dataclass(frozen=True)
class Plan:
    """Which data rank runs which documents in which row.

    Attributes:
        rows: For each data rank its rows, equally many on all of them.
    """

    rows: tuple[tuple[Row, ...], ...]

    @property
    def rows_per_rank(self) -> int:
        """Rows of each data rank."""
        return len(self.rows[0])

    @property
    def moves(self) -> bool:
        """Whether any document runs on another rank than its own."""
        return any(source != rank for rank, rows in enumerate(self.rows) for row in rows for source, _ in row)

    def documents(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Documents that ``rank`` runs, sorted by source rank and index: the order in which an exchange delivers."""
        return tuple(sorted(document for row in self.rows[rank] for document in row))

    def local_rows(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """The rows of ``rank`` as positions in :meth:`documents`."""
        position = {document: index for index, document in enumerate(self.documents(rank))}
        return tuple(tuple(position[document] for document in row) for row in self.rows[rank])

    def destinations(self, source: int) -> tuple[int, ...]:
        """The rank that runs each document of rank ``source``, in the order of its documents."""
        targets = {
            index: rank
            for rank, rows in enumerate(self.rows)
            for row in rows
            for owner, index in row
            if owner == source
        }
        return tuple(targets[index] for index in range(len(targets)))


def plan_rows(
    lengths: Sequence[Sequence[int]],
    *,
    budget: int | None,
    multiple_of: int = 1,
    rows_multiple_of: int = 1,
    move: bool = True,
    units: Sequence[Sequence[int]] | None = None,
    linear_cost: float = 1.0,
    quadratic_cost: float = 0.0,
) -> Plan:
    """Plan the rows of all data ranks. Pure: no communication, the same result on every rank.

    Args:
        lengths: ``lengths[rank][index]`` is the number of tokens of a document. A rank may have none.
        budget: Most tokens in a row, padding included; ``None``: no limit, ``rows_multiple_of`` rows per rank.
        multiple_of: Rows are padded to a multiple of this.
        rows_multiple_of: The number of rows per rank is a multiple of this, and at least this, also without documents.
        move: Whether documents may run on another data rank than their own.
        units: ``units[rank][index]`` names the unit of a document, over all ranks; the documents of a unit share a row.
            Without ``move`` they must be on one rank. ``None``: every document is a unit of its own.
        linear_cost: Cost of a token.
        quadratic_cost: Cost of a pair of tokens of one document, that is, of attention.

    Raises:
        ValueError: An argument is out of range, or a document or a unit is longer than the budget; the message names
            its rank and index, or the unit.
    """
    capacity = row_capacity(budget, multiple_of)
    if not lengths:
        raise ValueError("lengths=[] has no data rank: give one list per data rank, for instance [[3, 5]]")
    if rows_multiple_of < 1:
        raise ValueError(f"rows_multiple_of={rows_multiple_of} must be at least 1, for instance 1")
    for name, value in (("linear_cost", linear_cost), ("quadratic_cost", quadratic_cost)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name}={value} must be finite and not negative, for instance 1.0")
    documents = _check_documents(lengths, budget, multiple_of, linear_cost, quadratic_cost)
    plan = _plan_together if move else _plan_apart
    if units is None:
        return plan(documents, capacity, rows_multiple_of)
    bundles, members = _bundle(documents, units, move)
    for own in bundles:
        for bundle in own:
            if capacity is not None and bundle.tokens > capacity:
                unit = units[bundle.rank][bundle.position]
                raise ValueError(_unit_too_long(unit, bundle.tokens, budget, multiple_of))
    return _unbundle(plan(bundles, capacity, rows_multiple_of), members)


class _Document(NamedTuple):
    """Negative numbers, so that sorting puts the dearest first; equal ones follow their source."""

    negative_cost: float
    negative_tokens: int
    rank: int
    position: int

    @property
    def tokens(self) -> int:
        return -self.negative_tokens

    @property
    def cost(self) -> float:
        return -self.negative_cost


@dataclass
class _Bin:
    """A row under construction; the documents stay sorted, dearest first."""

    tokens: int = 0
    cost: float = 0.0
    documents: list[_Document] = field(default_factory=list)

    def add(self, document: _Document) -> None:
        insort(self.documents, document)
        self.tokens += document.tokens
        self.cost += document.cost

    def remove(self, document: _Document) -> None:
        del self.documents[bisect_left(self.documents, document)]
        self.tokens -= document.tokens
        self.cost -= document.cost

    def row(self) -> Row:
        return tuple(sorted((document.rank, document.position) for document in self.documents))


def _check_documents(
    lengths: Sequence[Sequence[int]], budget: int | None, multiple_of: int, linear_cost: float, quadratic_cost: float
) -> list[list[_Document]]:
    capacity = row_capacity(budget, multiple_of)
    documents: list[list[_Document]] = []
    for rank, own in enumerate(lengths):
        documents.append([])
        for index, tokens in enumerate(own):
            if tokens < 1:
                raise ValueError(f"document {index} of data rank {rank} has {tokens} tokens: it needs at least one")
            if capacity is not None and tokens > capacity:
                raise ValueError(_too_long(rank, index, tokens, budget, multiple_of, lengths))
            cost = linear_cost * tokens + quadratic_cost * tokens * tokens
            documents[rank].append(_Document(-cost, -tokens, rank, index))
    return documents


def _bundle(
    documents: list[list[_Document]], units: Sequence[Sequence[int]], move: bool
) -> tuple[list[list[_Document]], dict[tuple[int, int], Row]]:
    """Make one document of each unit, in the place of the unit's first; also tell which documents it stands for."""
    sizes, expected = [len(own) for own in units], [len(own) for own in documents]
    if sizes != expected:
        raise ValueError(f"units has {sizes} entries per data rank, but there are {expected} documents: give one each")
    together: dict[int, list[_Document]] = {}
    for own, names in zip(documents, units, strict=True):
        for document, unit in zip(own, names, strict=True):
            together.setdefault(unit, []).append(document)
    bundles: list[list[_Document]] = [[] for _ in documents]
    members: dict[tuple[int, int], Row] = {}
    for unit, parts in together.items():
        first, last = parts[0], parts[-1]
        if not move and first.rank != last.rank:
            raise ValueError(
                f"the documents of unit {unit} are on data ranks {first.rank} and {last.rank}, so they cannot share a "
                "row: put them on one rank, or let documents move (move=True)"
            )
        cost, tokens = sum(part.negative_cost for part in parts), sum(part.negative_tokens for part in parts)
        bundles[first.rank].append(_Document(cost, tokens, first.rank, first.position))
        members[first.rank, first.position] = tuple((part.rank, part.position) for part in parts)
    return bundles, members


def _unbundle(plan: Plan, members: dict[tuple[int, int], Row]) -> Plan:
    def unfold(row: Row) -> Row:
        return tuple(sorted(document for bundle in row for document in members[bundle]))

    return Plan(tuple(tuple(unfold(row) for row in rows) for rows in plan.rows))


def _plan_together(documents: list[list[_Document]], capacity: int | None, rows_multiple_of: int) -> Plan:
    ranks = len(documents)
    pool = sorted(document for own in documents for document in own)
    count = round_up(len(_best_fit(pool, capacity)), ranks * rows_multiple_of)
    bins = _fill(pool, count, capacity)
    _even_out(bins, capacity)
    bins.sort(key=_dearest_first)
    totals = [0.0] * ranks
    rows: list[list[Row]] = [[] for _ in range(ranks)]
    for start in range(0, count, ranks):
        step = bins[start : start + ranks]
        _even_out(step, capacity)
        step.sort(key=_dearest_first)
        by_load = sorted(range(ranks), key=lambda rank: (totals[rank], rank))
        for rank, current in zip(by_load, step, strict=True):
            rows[rank].append(current.row())
            totals[rank] += current.cost
    return Plan(tuple(tuple(own) for own in rows))


def _plan_apart(documents: list[list[_Document]], capacity: int | None, rows_multiple_of: int) -> Plan:
    pools = [sorted(own) for own in documents]
    count = round_up(max(len(_best_fit(pool, capacity)) for pool in pools), rows_multiple_of)
    rows = []
    for pool in pools:
        bins = _fill(pool, count, capacity)
        _even_out(bins, capacity)
        # Dear rows meet dear rows of the other ranks.
        bins.sort(key=_dearest_first)
        rows.append(tuple(current.row() for current in bins))
    return Plan(tuple(rows))


def _best_fit(pool: Sequence[_Document], capacity: int | None) -> list[_Bin]:
    """Pack by tokens into few rows: each document into the fullest row with room, longest document first."""
    if capacity is None:
        return [_fresh(pool)] if pool else []
    bins: list[_Bin] = []
    free: list[tuple[int, int]] = []  # (room left, row), sorted
    for document in sorted(pool, key=lambda document: document.negative_tokens):
        place = bisect_left(free, (document.tokens, -1))
        if place < len(free):
            room, row = free.pop(place)
        else:
            room, row = capacity, len(bins)
            bins.append(_Bin())
        bins[row].add(document)
        insort(free, (room - document.tokens, row))
    return bins


def _fill(pool: Sequence[_Document], count: int, capacity: int | None) -> list[_Bin]:
    """Deal ``pool``, dearest first, to the cheapest of ``count`` rows with room."""
    bins = [_Bin() for _ in range(count)]
    open_rows = [(0.0, row) for row in range(count)]
    shortest = min((document.tokens for document in pool), default=0)
    for document in pool:
        passed: list[tuple[float, int]] = []
        while True:
            if not open_rows or len(passed) > _FILL_ATTEMPTS:
                packed = _best_fit(pool, capacity)
                return packed + [_Bin() for _ in range(count - len(packed))]
            entry = heapq.heappop(open_rows)
            current = bins[entry[1]]
            if capacity is None or current.tokens + document.tokens <= capacity:
                break
            if current.tokens + shortest <= capacity:
                passed.append(entry)  # has room for a later document; a full row never comes back
        current.add(document)
        for again in (*passed, (current.cost, entry[1])):
            heapq.heappush(open_rows, again)
    return bins


def _even_out(bins: list[_Bin], capacity: int | None) -> None:
    """Lower the dearest rows by moves and swaps between pairs of rows, in place."""
    fruitless = 0
    for sweep in range(_EVEN_SWEEPS):
        order = sorted(range(len(bins)), key=lambda row: (-bins[row].cost, row))
        half = len(bins) // 2
        improved = False
        for place in range(half):
            # The dearest meets the cheapest; in the next sweep another one.
            partner = len(bins) - 1 - (place + sweep) % half
            for _ in range(_EXCHANGES_PER_PAIR):
                if not _exchange(bins[order[place]], bins[order[partner]], capacity):
                    break
                improved = True
        fruitless = 0 if improved else fruitless + 1
        if fruitless >= min(_FRUITLESS_SWEEPS, half):
            return


def _exchange(dear: _Bin, cheap: _Bin, capacity: int | None) -> bool:
    """Make the move or swap between two rows that lowers the dearer one most; False where none does."""
    if dear.cost < cheap.cost:
        dear, cheap = cheap, dear
    gap = dear.cost - cheap.cost
    best: tuple[float, _Document, _Document | None] | None = None
    for given in dear.documents:
        wanted = given.cost - gap / 2
        place = bisect_left(cheap.documents, (-wanted,))
        # The two neighbours of the ideal partner, or nothing in return.
        for taken in (*cheap.documents[max(place - 1, 0) : place + 1], None):
            flow = given.cost - (taken.cost if taken else 0.0)
            if not 0 < flow < gap or not _fits(dear, cheap, given, taken, capacity):
                continue
            distance = abs(flow - gap / 2)
            if best is None or distance < best[0]:
                best = (distance, given, taken)
    # Below rounding errors a gain is none, and the search could go on for ever.
    if best is None or gap / 2 - best[0] <= 1e-9 * dear.cost:
        return False
    _, given, taken = best
    dear.remove(given)
    cheap.add(given)
    if taken is not None:
        cheap.remove(taken)
        dear.add(taken)
    return True


def _fits(dear: _Bin, cheap: _Bin, given: _Document, taken: _Document | None, capacity: int | None) -> bool:
    if capacity is None:
        return True
    flow = given.tokens - (taken.tokens if taken else 0)
    return cheap.tokens + flow <= capacity and dear.tokens - flow <= capacity


def _fresh(pool: Sequence[_Document]) -> _Bin:
    return _Bin(sum(document.tokens for document in pool), sum(document.cost for document in pool), list(pool))


def _dearest_first(current: _Bin) -> tuple[float, tuple[int, ...], Row]:
    # Lengths decide before sources do: the lengths of the rows do not depend on which rank holds a document.
    return -current.cost, tuple(document.negative_tokens for document in current.documents), current.row()


def round_up(count: int, multiple: int) -> int:
    """The next multiple; one of it at least."""
    return max(1, -(-count // multiple)) * multiple


def row_capacity(budget: int | None, multiple_of: int) -> int | None:
    """The most tokens of a row whose length is a multiple of ``multiple_of``; ``None`` for no limit.

    Raises:
        ValueError: The budget holds no such row.
    """
    if multiple_of < 1:
        raise ValueError(f"multiple_of={multiple_of} must be at least 1, for instance 1")
    if budget is None:
        return None
    if budget < multiple_of:
        raise ValueError(
            f"max_tokens_per_micro_batch={budget} must hold a row of multiple_of={multiple_of} tokens, for instance "
            "4096"
        )
    return budget // multiple_of * multiple_of


def _too_long(
    rank: int, index: int, tokens: int, budget: int | None, multiple_of: int, lengths: Sequence[Sequence[int]]
) -> str:
    longest = round_up(max(max(own, default=0) for own in lengths), multiple_of)
    padded = f" (rows are padded to a multiple of {multiple_of})" if multiple_of > 1 else ""
    return (
        f"document {index} of data rank {rank} has {tokens} tokens, more than "
        f"max_tokens_per_micro_batch={budget} allows in a row{padded}: raise it to at least {longest}, or shorten the "
        "document"
    )


def _unit_too_long(unit: int, tokens: int, budget: int | None, multiple_of: int) -> str:
    return (
        f"the documents of unit {unit} have {tokens} tokens together, more than max_tokens_per_micro_batch={budget} "
        f"allows in the row that they share: raise it to at least {round_up(tokens, multiple_of)}, or shorten them"
    )
