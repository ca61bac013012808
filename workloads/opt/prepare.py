"""Compile the operators that a run's configuration needs; run once per node, and quick if they exist."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path


def main() -> None:
    """Compile CPUAdam if the configuration offloads the optimizer; do nothing otherwise."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", type=Path)
    args, _ = parser.parse_known_args()
    if args.deepspeed_config is None:
        return
    config = json.loads(args.deepspeed_config.read_text(encoding="utf-8"))
    offload = config.get("zero_optimization", {}).get("offload_optimizer", {})
    if offload.get("device", "none") != "none":
        compile_once("cpu_adam", "CPUAdamBuilder")


def compile_once(name: str, builder: str) -> None:
    """Compile one of DeepSpeed's operators and write NAME.ready; do nothing if that file exists.

    The mark is what says that it is: loading it to see would cost the seconds that importing DeepSpeed takes.
    """
    mark = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / f"{name}.ready"
    if mark.exists():
        return
    from deepspeed.ops import op_builder

    print(f"compiling {name} for this node", flush=True)
    getattr(op_builder, builder)().load()
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


if __name__ == "__main__":
    main()
