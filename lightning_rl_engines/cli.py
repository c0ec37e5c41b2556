"""The command `lightning-rl`: LightningCLI with the defaults and the errors that a run of this package needs."""

import inspect
import os
import sys
import warnings
from argparse import RawDescriptionHelpFormatter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch.distributed as dist
from jsonargparse import ArgumentParser, DefaultHelpFormatter, Namespace
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from typing_extensions import override

import lightning_rl_engines
from lightning_rl_engines.callbacks import (
    ConfiguredLearningRate,
    GracefulInterrupt,
    PredictionFile,
    RichShardedModelSummary,
    RunProgressBar,
    RunReport,
    SampleTable,
    StartCard,
    UpdateCheckpoint,
)
from lightning_rl_engines.checkpoint import export_checkpoint, recover_checkpoints
from lightning_rl_engines.cli_errors import explain, strategy_problem
from lightning_rl_engines.models.config import DTypeName
from lightning_rl_engines.modules.base import RLModule
from lightning_rl_engines.strategies.engine import Engine

DESCRIPTION = """RL post-training of language models.

lightning-rl fit|validate|test|predict --config FILE [--OPTION VALUE ...]
lightning-rl export --checkpoint DIR --output DIR     a checkpoint as a Hugging Face folder; under torchrun, too
lightning-rl fit --model.help PolicyModule            the options of a module; also --data.help PromptDataModule
lightning-rl fit --config FILE --print_config         everything that would be used
lightning-rl fit --config FILE --ckpt_path last       go on after an interruption
torchrun ... -m lightning_rl_engines fit ...          several machines
"""

DEFAULT_ROOT = "runs"


def main(args: Sequence[str] | None = None) -> None:
    """Run the command.

    Args:
        args: The arguments after the program's name; by default those of the process. Processes that the Trainer
            starts for further ranks are given the arguments of the process in any case.

    Raises:
        SystemExit: A wrong configuration (exit code 2), or a run that was interrupted (130).
    """
    # A console script finds the modules beside itself, not those of the user's project.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    # Lightning's own use of torch, once for each process and nothing a user can change.
    warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
    arguments = sys.argv[1:] if args is None else list(args)
    try:
        if arguments[:1] == ["export"]:
            export(arguments[1:])
        else:
            LightningRLCLI(args=arguments)
    except MisconfigurationException as error:
        if _debugging():
            raise
        _fail(str(error))


def export(arguments: Sequence[str]) -> None:
    """Run `lightning-rl export`: turn a checkpoint into a Hugging Face folder, in all processes of torchrun."""
    parser = ArgumentParser(prog="lightning-rl export", description="Turn a checkpoint into a Hugging Face folder.")
    parser.add_argument("--checkpoint", type=str, required=True, help="The folder that a run saved, e.g. last.ckpt.")
    parser.add_argument("--output", type=str, required=True, help="The folder to write; an export there is replaced.")
    parser.add_argument(
        "--dtype", type=DTypeName | None, default=None, help="Type of the exported weights; by default the stored one."
    )
    parser.add_argument("--model", type=str, default="policy", help="Which of the module's models.")
    parser.add_argument("--max_shard_size", type=str, default="5GB", help="The largest file.")
    parser.add_argument(
        "--weights",
        type=Literal["full", "merged", "adapter"] | None,
        default=None,
        help="Of a run with LoRA: base plus adapter (the default), or the adapter as a peft folder.",
    )
    options = parser.parse_args(list(arguments))
    with _processes() as ranks:
        try:
            path = export_checkpoint(
                options.checkpoint,
                options.output,
                dtype=options.dtype,
                model=options.model,
                max_shard_size=options.max_shard_size,
                weights=options.weights,
                ranks=ranks,
            )
        except ValueError as error:
            if _debugging():
                raise
            _fail(str(error))
    if ranks is None or ranks.global_rank == 0:
        print(f"Wrote {path}.")


@contextmanager
def _processes() -> Iterator["_Processes | None"]:
    """The processes that torchrun has started, while the context lasts; ``None`` for one alone."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield _Processes()
    finally:
        dist.destroy_process_group()


class _Processes:
    """All ranks of the process group."""

    @property
    def global_rank(self) -> int:
        return dist.get_rank()

    def all_gather_objects(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(items, item)
        return items


class _HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions."""


class LightningRLParser(LightningArgumentParser):
    """Says what is wrong in a few lines, the reason last, with what was probably meant."""

    @override
    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error or _debugging():
            super().error(message, ex)
        options = [*_option_names(), *self.get_defaults(skip_validation=True).keys()]
        _fail(explain(message, options=options, classes=_class_names()), code=2)


class LightningRLCLI(LightningCLI):
    """LightningCLI over any LightningModule and LightningDataModule, short class names for those of this package.

    Beyond LightningCLI's:

    - `trainer.default_root_dir` is `runs`; checkpoints go to its folder `checkpoints`, the same in each process and
      run, so that `--ckpt_path last` finds them. An explicit `last` that finds nothing is an error.
    - The command line wins over the hyper-parameters of a checkpoint; what differs is printed.
      `--learning_rate_on_resume config` takes the learning rate of the configuration too.
    - Callbacks and logger that a run needs are added unless the configuration names others of their kind.

    Args:
        args: Command-line arguments, or a configuration.
        run: Whether to run the subcommand, or only to build the objects.
    """

    def __init__(self, args: ArgsType = None, *, run: bool = True) -> None:
        self._ckpt_path: str | None = None
        super().__init__(
            args=args,
            run=run,
            parser_class=LightningRLParser,
            parser_kwargs={"description": DESCRIPTION, "formatter_class": _HelpFormatter, **_subcommand_help()}
            if run
            else None,
            save_config_kwargs={"overwrite": True},
            seed_everything_default=0,
            trainer_defaults={"default_root_dir": DEFAULT_ROOT},
            auto_configure_optimizers=False,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--learning_rate_on_resume",
            type=Literal["checkpoint", "config"],
            default="checkpoint",
            help="With --ckpt_path: go on with the checkpoint's learning rate, or take the configured one.",
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        if isinstance(args, dict | Namespace):
            self.config = parser.parse_object(args)
        else:
            self.config = parser.parse_args(args)
        options = self._options(self.config)
        # LightningCLI lets the hyper-parameters of a checkpoint *file* silently replace those of the command line.
        if "ckpt_path" in options:
            self._ckpt_path = options.ckpt_path
            options.ckpt_path = None
        strategy = options.trainer.strategy
        problem = None
        if isinstance(strategy, str):
            problem = strategy_problem(strategy, ours=_strategy_names(), known=StrategyRegistry.available_strategies())
        if problem is not None:
            parser.error(problem)
        if options.learning_rate_on_resume == "config" and self._ckpt_path is None:
            parser.error("learning_rate_on_resume=config needs a run to resume; add --ckpt_path last, to fit.")

    @override
    def before_instantiate_classes(self) -> None:
        if self._ckpt_path is not None:
            self._options(self.config).ckpt_path = self._ckpt_path

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (ValueError, TypeError) as error:
            # Constructors refuse values with a message that stands alone.
            if _debugging():
                raise
            self.parser.error(f"{error} (JSONARGPARSE_DEBUG=1 shows where.)")

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        options = self._options(self.config_init)
        given = options.trainer.callbacks or []
        callbacks = list(given) if isinstance(given, list) else [given]
        root = str(options.trainer.default_root_dir or DEFAULT_ROOT)
        callbacks += self._missing_callbacks(callbacks, options.trainer)
        for callback in callbacks:
            if isinstance(callback, ModelCheckpoint):
                _settle(callback, root)
        logger = options.trainer.logger
        if logger is None or logger is True:
            logger = CSVLogger(save_dir=root, name="logs")
        trainer = super().instantiate_trainer(callbacks=callbacks, logger=logger, default_root_dir=root, **kwargs)
        self._check_checkpoint(trainer, callbacks)
        return trainer

    def _missing_callbacks(self, given: list[Callback], trainer: Namespace) -> Iterator[Callback]:
        """Yield the callbacks of a run, without those of which the configuration has its own."""

        def missing(kind: type[Callback]) -> bool:
            return not any(isinstance(callback, kind) for callback in given)

        ours = isinstance(self.model, RLModule)
        if trainer.enable_progress_bar is not False and missing(ProgressBar):
            yield RunProgressBar()
        if ours and missing(SampleTable):
            yield SampleTable()
        # Also outside fit, where it does nothing: Lightning wants a checkpoint's callbacks to be there.
        if ours and missing(RunReport):
            yield RunReport()
        if self.subcommand == "predict" and ours and missing(PredictionFile):
            yield PredictionFile()
        if trainer.enable_checkpointing is not False and missing(ModelCheckpoint):
            yield UpdateCheckpoint() if ours else ModelCheckpoint(save_last=True, enable_version_counter=False)
        if self.subcommand not in (None, "fit"):
            return
        if missing(StartCard):
            yield StartCard()
        if trainer.enable_model_summary is not False and missing(ModelSummary):
            yield RichShardedModelSummary()
        if self._options(self.config_init).learning_rate_on_resume == "config" and missing(ConfiguredLearningRate):
            yield ConfiguredLearningRate()
        if missing(GracefulInterrupt):
            yield GracefulInterrupt()

    def _check_checkpoint(self, trainer: Trainer, callbacks: list[Callback]) -> None:
        """Refuse, before anything is built, a checkpoint that does not exist."""
        path = self._ckpt_path
        if path is None or path in ("best", "hpc") or "://" in path or path.startswith("registry"):
            return
        if path != "last":
            recover_checkpoints(Path(path).parent)
            if not Path(path).exists():
                self.parser.error(f"ckpt_path={path!r} does not exist; name a checkpoint, or use --ckpt_path last.")
            return
        folders = [str(item.dirpath) for item in callbacks if isinstance(item, ModelCheckpoint)]
        for folder in folders:
            recover_checkpoints(Path(folder))
        pattern = f"{ModelCheckpoint.CHECKPOINT_NAME_LAST}*{ModelCheckpoint.FILE_EXTENSION}"
        if not any(any(Path(folder).glob(pattern)) for folder in folders):
            where = " or ".join(folders) or "the run: it has no ModelCheckpoint"
            self.parser.error(
                f"ckpt_path='last' finds no {pattern} in {where}; leave --ckpt_path out to start anew, or name the run "
                "with --trainer.default_root_dir."
            )

    def _options(self, config: Namespace) -> Namespace:
        """Return the part of a configuration that belongs to the subcommand."""
        name = config.get("subcommand")
        return config if name is None else config[name]


def _subcommand_help() -> dict[str, dict[str, Any]]:
    """Descriptions of the subcommands: their options are those of the Trainer until a class is named."""
    purposes = {
        "fit": "Train.",
        "validate": "Answer the validation prompts greedily and score the answers.",
        "test": "Answer the test prompts greedily and score the answers.",
        "predict": "Answer prompts greedily; responses and log-probabilities go to a JSON-lines file.",
    }
    more = "The options of a class: --model.help PolicyModule, --data.help PromptDataModule,\n"
    more += "--trainer.strategy.help FSDPUlyssesStrategy, --trainer.callbacks.help WeightExport."
    return {
        name: {"description": f"{purpose}\n\n{more}", "formatter_class": _HelpFormatter}
        for name, purpose in purposes.items()
    }


def _settle(callback: ModelCheckpoint, root: str) -> None:
    """Give checkpoints a folder that the next process finds, and refuse what may hang.

    Raises:
        MisconfigurationException: Saving in an exception, which is a collective that other ranks may not come to.
    """
    if callback.save_on_exception:
        raise MisconfigurationException(
            "ModelCheckpoint(save_on_exception=True) saves with all ranks while one of them has failed, and may wait "
            "for ever; leave it out: GracefulInterrupt, which is on by default, saves when a run is stopped."
        )
    if callback.dirpath is None:
        callback.dirpath = os.path.realpath(os.path.join(root, "checkpoints"))


def _strategy_names() -> list[str]:
    """Registered names and class names of this package's strategies."""
    classes = [item for item in _public_classes() if issubclass(item, Engine) and not inspect.isabstract(item)]
    modules = {item.__module__ for item in classes}
    registered = [
        name
        for name in StrategyRegistry.available_strategies()
        if StrategyRegistry[name]["strategy"].__module__ in modules
    ]
    return [*registered, *(item.__name__ for item in classes)]


def _public_classes() -> Iterator[type]:
    for name in dir(lightning_rl_engines):
        item = getattr(lightning_rl_engines, name)
        if inspect.isclass(item) and item.__module__.startswith("lightning_rl_engines."):
            yield item


def _class_names() -> list[str]:
    """Class names that are likely meant: ours, and the usual ones of torch and Lightning."""
    usual = ["Adam", "AdamW", "SGD", "CSVLogger", "TensorBoardLogger", "WandbLogger", "ModelCheckpoint"]
    return [*(item.__name__ for item in _public_classes()), *usual]


def _option_names() -> list[str]:
    """Constructor arguments of our classes."""
    return sorted({name for item in _public_classes() for name in inspect.signature(item).parameters})


def _debugging() -> bool:
    return os.environ.get("JSONARGPARSE_DEBUG", "").lower() not in ("", "0", "false")


def _fail(message: str, *, code: int = 1) -> NoReturn:
    sys.stderr.write(f"{message if 'error: ' in message else f'error: {message}'}\n")
    raise SystemExit(code)


if __name__ == "__main__":
    main()
