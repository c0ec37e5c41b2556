"""Send documents to the data ranks that run them, and their results home.

Every call makes one ``all_to_all_single`` over one byte buffer: per destination all columns one after another, each
seen as bytes, so values arrive bit for bit whatever their dtype.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_rl_engines.sequence.experience import Experience


def exchange_documents(
    experience: Experience,
    destinations: Sequence[int],
    group: ProcessGroup | None,
    *,
    device: torch.device | str | None = None,
) -> tuple[Experience, tuple[tuple[int, int], ...]]:
    """Send each document to a rank of ``group``. Collective over ``group``; errors are raised by all its ranks.

    Args:
        experience: This rank's documents, maybe none. Ranks that have some need the same columns and dtypes; a rank
            without takes over theirs.
        destinations: The rank in ``group`` that each document goes to, for instance ``plan.destinations(rank)``.
        group: Data ranks; ``None`` or a group of one sends nothing.
        device: Where the buffer that travels lives, for a backend that cannot send from where the experience is.

    Returns:
        The documents that arrived, on the device of ``experience``, and where each came from: ``(source rank, index
        there)``, sorted, which is the order of ``plan.documents(rank)``.

    Raises:
        ValueError: A destination is out of range or the ranks' columns differ.
    """
    size = 1 if group is None else dist.get_world_size(group)
    own = _Announcement(
        lengths=experience.lengths,
        destinations=tuple(destinations),
        token={name: value.dtype for name, value in experience.token_columns.items()},
        document={name: value.dtype for name, value in experience.document_columns.items()},
    )
    everyone = [own] * size
    if size > 1:
        dist.all_gather_object(everyone, own, group=group)
    schema = _check(everyone)
    routes = [_arriving(everyone, rank) for rank in range(size)]
    if size == 1:
        return experience, routes[0]

    rank = dist.get_rank(group)
    origin = routes[rank]
    outgoing = [[index for source, index in route if source == rank] for route in routes]
    incoming = [[index for owner, index in origin if owner == source] for source in range(size)]
    sent_tokens = [sum(experience.lengths[index] for index in indices) for indices in outgoing]
    received_tokens = [
        sum(other.lengths[index] for index in indices) for other, indices in zip(everyone, incoming, strict=True)
    ]
    sent = experience.select([index for indices in outgoing for index in indices])
    # An empty rank's own columns have no dtype to speak of, and it may lack some.
    columns = {
        name: sent[name] if len(sent) else torch.empty(0, dtype=dtype)
        for name, dtype in (schema.token | schema.document).items()
    }
    received = _all_to_all(
        columns,
        {name: sent_tokens if name in schema.token else [len(indices) for indices in outgoing] for name in columns},
        {name: received_tokens if name in schema.token else [len(indices) for indices in incoming] for name in columns},
        group,
        torch.device(device) if device is not None else experience.device,
    )
    home = {name: value.to(experience.device) for name, value in received.items()}
    arrived = Experience(
        lengths=[everyone[source].lengths[index] for source, index in origin],
        token_columns={name: home[name] for name in schema.token},
        document_columns={name: home[name] for name in schema.document},
    )
    return arrived, origin


def return_columns(
    columns: Mapping[str, Tensor],
    *,
    origin: Sequence[tuple[int, int]],
    received_lengths: Sequence[int],
    destinations: Sequence[int],
    lengths: Sequence[int],
    group: ProcessGroup | None,
    device: torch.device | str | None = None,
) -> dict[str, Tensor]:
    """Send per-token results of the received documents home. Collective over ``group``.

    Args:
        columns: Flat ``[tokens of the received documents]``; same names and dtypes on all ranks, also on one that
            received nothing.
        origin: What :func:`exchange_documents` returned.
        received_lengths: Lengths of the received documents.
        destinations: What :func:`exchange_documents` was given.
        lengths: Lengths of this rank's own documents.
        group: The group of :func:`exchange_documents`.
        device: As there.

    Returns:
        The same names, flat ``[tokens of this rank's own documents]``, in their original order, on the device of the
        columns.

    Raises:
        ValueError: A column does not have one value per received token. Raised before anything is sent, by this rank.
    """
    for name, column in columns.items():
        if column.shape != (sum(received_lengths),):
            raise ValueError(
                f"column {name!r} has shape {list(column.shape)}, but the received documents have "
                f"{sum(received_lengths)} tokens: give one value per token"
            )
    size = 1 if group is None else dist.get_world_size(group)
    if size == 1:
        return dict(columns)
    columns = dict(sorted(columns.items()))  # the order in which all ranks lay out their bytes
    # Received documents are sorted by source and index, so both sides know the order of what travels.
    counts = [0] * size
    for (source, _), length in zip(origin, received_lengths, strict=True):
        counts[source] += length
    arriving = [0] * size
    for target, length in zip(destinations, lengths, strict=True):
        arriving[target] += length
    home = next((column.device for column in columns.values()), torch.device("cpu"))
    received = _all_to_all(
        columns,
        dict.fromkeys(columns, counts),
        dict.fromkeys(columns, arriving),
        group,
        torch.device(device) if device is not None else home,
    )
    place = _sending_order(destinations, lengths).to(home)
    results = {name: torch.empty(sum(lengths), dtype=value.dtype, device=home) for name, value in received.items()}
    return {name: result.index_copy_(0, place, received[name].to(home)) for name, result in results.items()}


def _sending_order(destinations: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Flat indices of this rank's own tokens in the order in which they were sent: by destination, then by index."""
    if not lengths:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.arange(sum(lengths)).split(list(lengths))
    by_target = sorted(range(len(lengths)), key=lambda index: (destinations[index], index))
    return torch.cat([ids[index] for index in by_target])


@dataclass(frozen=True)
class _Announcement:
    """What a rank tells the others before anything is sent."""

    lengths: tuple[int, ...]
    destinations: tuple[int, ...]
    token: dict[str, torch.dtype]
    document: dict[str, torch.dtype]


def _arriving(everyone: Sequence[_Announcement], rank: int) -> tuple[tuple[int, int], ...]:
    """Source and index of the documents that go to ``rank``, sorted."""
    return tuple(
        (source, index)
        for source, other in enumerate(everyone)
        for index, target in enumerate(other.destinations)
        if target == rank
    )


def _check(everyone: Sequence[_Announcement]) -> _Announcement:
    """The announcement whose columns all ranks with documents agree on."""
    for rank, other in enumerate(everyone):
        if len(other.destinations) != len(other.lengths):
            raise ValueError(
                f"destinations of rank {rank} has {len(other.destinations)} entries for {len(other.lengths)} "
                "documents: give one rank per document"
            )
        for index, target in enumerate(other.destinations):
            if not 0 <= target < len(everyone):
                raise ValueError(
                    f"destinations of rank {rank} sends document {index} to {target}: use 0 to {len(everyone) - 1}"
                )
    filled = [(rank, other) for rank, other in enumerate(everyone) if other.lengths]
    if not filled:
        return everyone[0]
    first, reference = filled[0]
    for rank, other in filled:
        if (other.token, other.document) != (reference.token, reference.document):
            raise ValueError(
                f"rank {rank} has the columns {other.token} per token and {other.document} per document, rank {first} "
                f"{reference.token} and {reference.document}: all ranks need the same columns and dtypes"
            )
    return reference


def _all_to_all(
    columns: Mapping[str, Tensor],
    sent: Mapping[str, Sequence[int]],
    received: Mapping[str, Sequence[int]],
    group: ProcessGroup | None,
    device: torch.device,
) -> dict[str, Tensor]:
    """Exchange columns whose values are sorted by destination; ``sent`` and ``received`` count values per rank."""
    size = dist.get_world_size(group)
    parts = {name: column.contiguous().view(torch.uint8).to(device) for name, column in columns.items()}
    width = {name: column.element_size() for name, column in columns.items()}

    def split(counts: Mapping[str, Sequence[int]]) -> list[int]:
        return [sum(counts[name][rank] * width[name] for name in columns) for rank in range(size)]

    pieces = {name: part.split([n * width[name] for n in sent[name]]) for name, part in parts.items()}
    outgoing = torch.cat([pieces[name][rank] for rank in range(size) for name in columns])
    input_sizes, output_sizes = split(sent), split(received)
    incoming = torch.empty(sum(output_sizes), dtype=torch.uint8, device=device)
    dist.all_to_all_single(incoming, outgoing, output_sizes, input_sizes, group=group)
    flat = incoming.split([received[name][rank] * width[name] for rank in range(size) for name in columns])
    result = {}
    for position, (name, column) in enumerate(columns.items()):
        # A concatenation starts at an aligned address, which a piece of the buffer need not.
        result[name] = torch.cat(flat[position :: len(columns)]).view(column.dtype)
    return result
