"""``python -m lightning_rl_engines``, the same as ``lightning-rl``: the form that ``torchrun -m`` can start."""

from lightning_rl_engines.cli import main

if __name__ == "__main__":
    main()
