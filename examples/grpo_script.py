"""The task of the quickstart as a Python script: what its YAML says, said to the Trainer.

    python examples/grpo_script.py                          one process
    python examples/grpo_script.py --devices 2              two processes, different prompts on each
    python examples/grpo_script.py --devices 2 --sp 2       two processes, half of every row on each
    python examples/grpo_script.py --max-steps 8 --batch-size 2      a short trial

Run it in the root of the repository. It trains a Qwen3 of 76 thousand parameters, random at first, to copy a word.
"""

import argparse

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.optim import AdamW

from lightning_rl_engines import (
    FSDPUlyssesStrategy,
    GRPOAdvantage,
    HFFolderSink,
    HFRollout,
    ModelConfig,
    PolicyLoss,
    PolicyModule,
    PromptDataModule,
    Reward,
    RunProgressBar,
    RunReport,
    SampleTable,
    StartCard,
    WarmupCosine,
    WeightExport,
)


def letters_in_place(completion: str, answer: str) -> float:
    """Share of letters that are right and in the right place; `answer` is a column of the prompt file."""
    response = completion.strip()
    right = sum(given == wanted for given, wanted in zip(response, answer, strict=False))
    return right / max(len(response), len(answer))


def build_module() -> PolicyModule:
    return PolicyModule(
        policy=ModelConfig(from_config="examples/quickstart"),
        rollout=HFRollout(num_generations=16, max_new_tokens=5),
        reward={"letters": Reward(letters_in_place)},
        loss=PolicyLoss(clip_high=0.28, entropy_coef=0.05),
        advantage=GRPOAdvantage(),
        optimizer=lambda parameters: AdamW(parameters, lr=3e-3, weight_decay=0.0),
        lr_scheduler=lambda optimizer: WarmupCosine(optimizer, warmup_steps=8, min_ratio=0.1),
        mini_batches=8,
        max_tokens_per_micro_batch=4096,
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO on the CPU.")
    parser.add_argument("--max-steps", type=int, default=480, help="optimizer steps, 8 for each update")
    parser.add_argument("--batch-size", type=int, default=32, help="prompts of all processes in an update")
    parser.add_argument("--devices", type=int, default=1, help="processes")
    parser.add_argument("--sp", type=int, default=1, help="processes that share a row")
    parser.add_argument("--root", default="runs/script", help="where everything is written")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    seed_everything(1)
    module = build_module()
    data_ranks = arguments.devices // arguments.sp
    data = PromptDataModule(
        train="examples/quickstart/train.jsonl",
        val="examples/quickstart/val.jsonl",
        batch_size=arguments.batch_size // data_ranks,
    )
    export = WeightExport(sink=HFFolderSink(path=f"{arguments.root}/hf"), every_n_updates=30)
    trainer = Trainer(
        # The same as strategy=FSDPUlyssesStrategy(); the instance takes arguments.
        strategy="fsdp_ulysses" if arguments.sp == 1 else FSDPUlyssesStrategy(ulysses_sp_size=arguments.sp),
        accelerator="cpu",
        devices=arguments.devices,
        max_steps=arguments.max_steps,
        val_check_interval=10,
        check_val_every_n_epoch=None,
        log_every_n_steps=1,
        default_root_dir=arguments.root,
        logger=CSVLogger(save_dir=arguments.root, name="logs"),
        # The command line adds the last four by itself.
        callbacks=[export, RunProgressBar(), StartCard(), SampleTable(), RunReport()],
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(module, datamodule=data)

    prompts = ["copy fad\n", "copy hij\n", "copy bcd\n"]
    # All processes take part, because the model is sharded; one prints.
    responses = module.generate(prompts)
    if trainer.is_global_zero:
        for prompt, response in zip(prompts, responses, strict=True):
            print(f"{prompt.strip():10} -> {response.strip()}")
        print(f"Mean reward: {module.history['train/reward'].iloc[-1]:.3f}. Weights: {export.last_path}")


if __name__ == "__main__":
    main()
