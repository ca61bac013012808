"""Prints its arguments, as nothing else of it matters to its callers."""

import sys
from dataclasses import dataclass

import habana_frameworks.torch  # noqa: F401


@dataclass
class FinetuneArguments:
    lora_rank: int = 8
    lora_target_modules: list[str] | None = None


if __name__ == "__main__":
    print(sys.argv)
    print("  train_samples_per_second = 12.5")
