"""Names of tensors in a Hugging Face save, and where a torchtitan model keeps them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

TIED_HEAD = "lm_head.weight"
"""The torchtitan parameter that is the embedding where a configuration ties them."""


@dataclass(frozen=True)
class HFPiece:
    """One tensor of a Hugging Face save inside a torchtitan tensor ``t``.

    It is ``piece = t if expert is None else t[expert]``, and ``piece.mT`` of that where ``transposed``.

    Attributes:
        name: Its name in the save.
        expert: Index on the first dimension of ``t``; ``None`` for the whole tensor.
        transposed: Whether the last two dimensions are swapped.
    """

    name: str
    expert: int | None = None
    transposed: bool = False

    def shape_in(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the piece, where ``shape`` is that of the whole torchtitan tensor."""
        own = shape if self.expert is None else shape[1:]
        return (*own[:-2], own[-1], own[-2]) if self.transposed else own


@dataclass(frozen=True)
class NameRule:
    """A pair of patterns with the placeholders ``{layer}`` and, for one tensor per expert, ``{expert}``.

    Attributes:
        hf: Pattern of names in a Hugging Face save.
        titan: Pattern of names in a torchtitan state dict; it has no ``{expert}``, experts are stacked.
        transposed: Whether the last two dimensions of a tensor of the save are swapped.
    """

    hf: str
    titan: str
    transposed: bool = False

    @property
    def per_expert(self) -> bool:
        """Whether the torchtitan tensor is a stack of one tensor per expert."""
        return "{expert}" in self.hf


class HFNames:
    """The two-way table of a model's tensor names.

    Args:
        rules: One for each kind of tensor; no two match the same name.
        tied: Whether the head is the embedding; it is saved once, as the embedding.
    """

    def __init__(self, rules: Iterable[NameRule], *, tied: bool = False) -> None:
        self.rules = tuple(rules)
        self.tied = tied
        self._by_titan = [(_compile(rule.titan), rule) for rule in self.rules]
        self._by_hf = [(_compile(rule.hf), rule) for rule in self.rules]

    def pieces(self, fqn: str, shape: tuple[int, ...]) -> tuple[HFPiece, ...]:
        """Return the tensors of a save that a parameter or persistent buffer holds.

        Args:
            fqn: Its name in ``model.state_dict()``.
            shape: Its whole, unsharded shape.

        Returns:
            The pieces, by expert where there are several; none for what a save does not hold, such as a tied head.
        """
        if self.tied and fqn == TIED_HEAD:
            return ()
        for pattern, rule in self._by_titan:
            if (match := pattern.fullmatch(fqn)) is None:
                continue
            if not rule.per_expert:
                return (HFPiece(rule.hf.format(**match.groupdict()), None, rule.transposed),)
            return tuple(
                HFPiece(rule.hf.format(**match.groupdict(), expert=expert), expert, rule.transposed)
                for expert in range(shape[0])
            )
        return ()

    def locate(self, name: str) -> tuple[str, int | None, bool] | None:
        """Return where a tensor of a save lies.

        Args:
            name: A name in a Hugging Face save.

        Returns:
            The torchtitan name, the expert's index or ``None``, and whether it is transposed; ``None`` for a name that
            the model has no place for, such as the head of a tied model.
        """
        for pattern, rule in self._by_hf:
            if (match := pattern.fullmatch(name)) is None:
                continue
            groups = match.groupdict()
            expert = groups.pop("expert", None)
            fqn = rule.titan.format(**groups)
            if self.tied and fqn == TIED_HEAD:
                return None
            return fqn, None if expert is None else int(expert), rule.transposed
        return None

    def for_value_head(self) -> "HFNames":
        """Return the names of a critic: the head is Hugging Face's ``score``, which is tied to nothing."""
        backbone = [rule for rule in self.rules if not rule.titan.startswith("lm_head.")]
        head = [NameRule(f"score.{kind}", f"lm_head.{kind}") for kind in ("weight", "bias")]
        return HFNames([*backbone, *head])


def checkpoint_name(names: HFNames, fqn: str, shape: tuple[int, ...]) -> str:
    """Return the name of a torchtitan tensor in checkpoints.

    Args:
        names: The table of the model.
        fqn: Name of the tensor in the state dict of a torchtitan model.
        shape: Its whole shape.

    Returns:
        ``hf.`` and the Hugging Face name if both are the same tensor; else, as for stacks of experts, ``titan.`` and
        ``fqn``.
    """
    pieces = names.pieces(fqn, shape)
    if len(pieces) == 1 and pieces[0].expert is None and not pieces[0].transposed:
        return f"hf.{pieces[0].name}"
    return f"titan.{fqn}"


def _compile(pattern: str) -> re.Pattern[str]:
    escaped = re.escape(pattern)
    for placeholder in ("layer", "expert"):
        escaped = escaped.replace(re.escape(f"{{{placeholder}}}"), rf"(?P<{placeholder}>\d+)")
    return re.compile(escaped)
