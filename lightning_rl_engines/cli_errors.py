"""What `lightning-rl` says when a configuration is wrong: the reason last, with what was probably meant.

Text in, text out: nothing here knows a parser.
"""

import difflib
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

FOREIGN_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        # verl
        "clip_ratio": "loss.clip_low and loss.clip_high",
        "clip_ratio_low": "loss.clip_low",
        "clip_ratio_high": "loss.clip_high",
        "clip_ratio_c": "loss.dual_clip",
        "loss_agg_mode": "loss.aggregation",
        "entropy_coeff": "loss.entropy_coef",
        "kl_loss_coef": "loss.kl_coef",
        "kl_loss_type": "loss.kl_estimator",
        "use_kl_loss": "loss.kl_coef above 0",
        "ppo_epochs": "model.update_epochs",
        "ppo_mini_batch_size": "model.mini_batches, a number of parts",
        "ppo_max_token_len_per_gpu": "model.max_tokens_per_micro_batch",
        "ppo_micro_batch_size_per_gpu": "model.max_tokens_per_micro_batch, in tokens",
        "use_dynamic_bsz": "always on: rows are packed up to model.max_tokens_per_micro_batch",
        "use_remove_padding": "always on: rows hold no padding",
        "ulysses_sequence_parallel_size": "strategy.ulysses_sp_size",
        "grad_clip": "model.max_grad_norm",
        "response_length": "rollout.max_new_tokens",
        "max_response_length": "rollout.max_new_tokens",
        "train_batch_size": "data.batch_size, prompts of a data rank",
        "adv_estimator": "model.advantage",
        "train_files": "data.train",
        "val_files": "data.val",
        "prompt_key": "data.prompt_column",
        "total_training_steps": "trainer.max_steps, in optimizer steps",
        # TRL
        "epsilon": "loss.clip_low and loss.clip_high",
        "epsilon_low": "loss.clip_low",
        "epsilon_high": "loss.clip_high",
        "delta": "loss.dual_clip",
        "beta": "loss.kl_coef",
        "loss_type": "loss.aggregation",
        "num_iterations": "model.update_epochs",
        "max_completion_length": "rollout.max_new_tokens",
        "per_device_train_batch_size": "data.batch_size, prompts of a data rank",
        "gradient_accumulation_steps": "model.max_tokens_per_micro_batch, which bounds the memory",
        "learning_rate": "optimizer.lr",
        "reward_funcs": "model.reward",
        "reward_weights": "reward.NAME.weight",
        "bf16": "trainer.precision bf16-mixed",
        # Lightning
        "gradient_clip_val": "model.max_grad_norm",
    }
)
"""Option names of verl, TRL and Lightning -> what says the same here."""

_PATTERNS = {
    "class": re.compile(r"Expected a dot import path string: (\S+)"),
    "subclass": re.compile(r"Import path (\S+) does not correspond to"),
    "option": re.compile(r"(?:Option|Key|Group) '([^']+)' is not (?:accepted|expected)"),
    "argument": re.compile(r"unrecognized arguments: --(\S+)"),
    "choice": re.compile(r"invalid choice: '([^']+)'"),
}


def explain(message: str, *, options: Iterable[str], classes: Iterable[str]) -> str:
    """Shorten a parser's message and put the useful part last.

    Args:
        message: What the parser says, possibly a nested list with one reason for each member of a union.
        options: Option names that exist, dotted or not.
        classes: Class names that can be given as a ``class_path``.

    Returns:
        A few lines without a final newline; the last holds the reason and, where one is near, "did you mean".
    """
    reason = _reason(message)
    lines = []
    key = re.search(r'Parser key "([^"]+)"', message)
    if key and key.group(1) != "config" and key.group(1) not in reason:
        lines.append(f"in {key.group(1)}:")
    value = re.search(r"Given value: (.+)", message)
    if value and value.group(1).strip() not in reason:
        lines.append(f"  given: {_shorten(value.group(1).strip())}")
    hint = suggestion(reason, options=options, classes=classes)
    lines.append(f"error: {reason}" + (f" {hint}" if hint else ""))
    return "\n".join(lines)


def suggestion(reason: str, *, options: Iterable[str], classes: Iterable[str]) -> str:
    """Return a sentence that names the option or class that was probably meant, or an empty string."""
    for kind, pattern in _PATTERNS.items():
        found = pattern.search(reason)
        if not found:
            continue
        if kind in ("class", "subclass"):
            return did_you_mean(found.group(1).rsplit(".", 1)[-1], classes)
        if kind == "choice":
            choices = re.search(r"choose from (.+)\)", reason)
            return did_you_mean(found.group(1), re.findall(r"[\w.]+", choices.group(1)) if choices else [])
        name = found.group(1).split("=", 1)[0]
        # `optimiser.class_path`: the part that is wrong is before the reserved word.
        name = re.sub(r"(\.init_args)?\.(class_path|init_args|dict_kwargs)$", "", name)
        foreign = FOREIGN_OPTIONS.get(name.rsplit(".", 1)[-1])
        if foreign is not None:
            return f"`{name.rsplit('.', 1)[-1]}` is {foreign} here."
        return did_you_mean(name, options)
    return ""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return "Did you mean ...?" with the nearest candidates, or an empty string when none is near."""
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    for word in dict.fromkeys((name.lower(), name.rsplit(".", 1)[-1].lower())):
        ratios = {other: difflib.SequenceMatcher(None, word, other).ratio() for other in by_lower}
        best = max(ratios.values(), default=0.0)
        if best >= 0.7:
            near = [by_lower[other] for other, ratio in ratios.items() if ratio > best - 0.02]
            return f"Did you mean {' or '.join(near[:3])}?"
    return ""


def strategy_problem(strategy: str, *, ours: Iterable[str], known: Iterable[str]) -> str | None:
    """Return what is wrong with a strategy given by name, or None.

    Args:
        strategy: The name.
        ours: Names and class names of this package's strategies.
        known: Every name in Lightning's registry.
    """
    ours = list(ours)
    if strategy in {*ours, *known, "auto"}:
        return None
    hint = did_you_mean(strategy, [*ours, *known])
    return " ".join(
        part for part in (f"trainer.strategy={strategy!r} does not exist; ours are {', '.join(ours)}.", hint) if part
    )


def _reason(message: str) -> str:
    """Pick the most telling line of a message: a union lists one reason for each of its members."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    if len(lines) == 1:
        return re.sub(r'^Parser key "config": ', "", lines[0])
    telling = [line for line in lines if any(pattern.search(line) for pattern in _PATTERNS.values())]
    if telling:
        return telling[-1]
    inside = re.findall(
        r"Problem with given class_path '[^']+':\s*\n(.+?)(?=\n\s*Given value type|\Z)", message, re.DOTALL
    )
    if inside:
        return _reason(inside[-1])  # what an argument of the class is refused for
    skipped = (
        "Parser key",
        "Does not validate",
        "Subtypes:",
        "Errors:",
        "Given value",
        "Expected a <class 'NoneType'>",
    )
    rest = [line for line in lines if not line.startswith(skipped)]
    specific = [line for line in rest if not re.match(r"Expected an? (<class|typing\.)", line)]
    if specific:
        return specific[-1]
    return _expected(rest, message) if rest else lines[0]


def _expected(lines: list[str], message: str) -> str:
    """Turn lines such as ``Expected a typing.Literal['a', 'b']`` into one sentence."""
    kinds = []
    for line in lines:
        kind = re.sub(r"^Expected an? ", "", line).split(". Got value", 1)[0]
        kind = re.sub(r"typing\.Literal\[(.*)\]", r"one of \1", kind)
        kinds.append(re.sub(r"<class '([\w.]+)'>", r"\1", kind))
    key = re.search(r'Parser key "([^"]+)"', message)
    value = re.search(r"G(?:iven|ot) value: (.+)", message)
    left = f"{key.group(1)}=" if key else ""
    given = _shorten(value.group(1).strip()) if value else "the value"
    return f"{left}{given} is not valid; use {' or '.join(dict.fromkeys(kinds))}."


def _shorten(text: str, limit: int = 160) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
