"""Causal language modelling (supervised fine-tuning) of an OPT model under DeepSpeed, started on every rank."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
import warnings
from typing import TYPE_CHECKING, Any

import arguments
from shapes import Config, InputError, lora_parameters, parameters

if TYPE_CHECKING:
    from argparse import Namespace

    from data import Corpus

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def main() -> int:
    """Parse, check, train; 2 and one line for what cannot be done as asked."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = arguments.parse()
    try:
        train(args, arguments.check(args))
    except InputError as error:
        print(f"train.py: rank {RANK}: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def train(args: Namespace, config: Config) -> None:
    """The whole run on this rank: decide, build, train, report."""
    import deepspeed
    import torch
    from deepspeed.utils.logging import set_log_level_from_string
    from device import choose_dtype, use_cores
    from model import build, find_snapshot

    set_log_level_from_string("error")
    warnings.filterwarnings("ignore", category=FutureWarning)
    use_cores()
    dtype = choose_dtype(args.dtype)
    snapshot, weights = (None, "random initialisation, as rehearsed") if args.rehearse else find_snapshot(args.model)
    tokenizer, corpus = prepare(args, config, dtype, weights, snapshot)

    torch.manual_seed(args.seed)
    ds_config = deepspeed_config(args, dtype[0])
    model = build(config, ds_config, snapshot, args)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=args.learning_rate, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, args))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=ds_config)

    torch.manual_seed(args.seed + RANK)
    report(args, run_steps(engine, corpus, args))
    if args.output:
        save(engine, model, tokenizer, args)
    torch.distributed.destroy_process_group()


def prepare(args: Namespace, config: Config, dtype: tuple[str, str], weights: str, snapshot: Any) -> tuple[Any, Corpus]:
    """Tokeniser and corpus; joins the other ranks, checks that all hold the same, and says what will be trained."""
    import deepspeed
    from data import load_corpus, load_tokenizer
    from deepspeed.accelerator import get_accelerator
    from device import agree

    tokenizer, tokenizer_from = load_tokenizer(snapshot, args.data, config)
    needed = args.steps * tokens_per_step(args)
    corpus, text = load_corpus(args, tokenizer, config, needed)
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    agree({"dtype": dtype[0], "weights": snapshot and snapshot.name, "tokens": corpus.fingerprint()})

    print(f"rank {RANK}/{WORLD} on {socket.gethostname()}", flush=True)
    total = parameters(config)
    trained = lora_parameters(config, args.lora_dim, tuple(args.lora_modules)) or total
    say(f"world size {WORLD}")
    say(f"model: {args.model}{', rehearsed' if args.rehearse else ''}, {total} parameters, {trained} of them trained")
    say(f"dtype: {dtype[0]} ({dtype[1]})")
    say(f"ZeRO stage: {args.zero_stage}")
    say(f"weights: {weights}")
    say(f"tokeniser: {tokenizer_from}")
    say(f"data: {text}")
    return tokenizer, corpus


def deepspeed_config(args: Namespace, dtype: str) -> dict[str, Any]:
    """DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch,
        "gradient_accumulation_steps": args.gradient_accumulation,
        "gradient_clipping": 1.0,
        "steps_per_print": sys.maxsize,
        "bf16": {"enabled": dtype == "bf16"},
        "fp16": {"enabled": dtype == "fp16", "initial_scale_power": 12},
        "zero_optimization": {
            "stage": args.zero_stage,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
    }


def schedule(step: int, args: Namespace) -> float:
    """Factor on the learning rate: a linear rise over the warm-up steps, then half a cosine down to a tenth."""
    if step < args.warmup_steps:
        return (step + 1) / (args.warmup_steps + 1)
    progress = (step - args.warmup_steps) / (args.steps - args.warmup_steps)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def run_steps(engine: Any, corpus: Corpus, args: Namespace) -> float:
    """Train; the seconds that the steps after the warm-up took, all ranks waiting for each other at both ends."""
    started = synchronised_time()
    for step in range(1, args.steps + 1):
        if step == args.warmup_steps + 1:
            started = synchronised_time()
        step_started = time.perf_counter()
        learning_rate = engine.get_lr()[0]
        loss = train_step(engine, corpus, step - 1, args)
        speed = tokens_per_step(args) / (time.perf_counter() - step_started)
        say(f"step {step}/{args.steps} loss {loss:.4f} lr {learning_rate:.1e} tokens/s {speed:.0f}")
    return synchronised_time() - started


def train_step(engine: Any, corpus: Corpus, step: int, args: Namespace) -> float:
    """One step of the optimiser; the loss, a mean over its micro-batches and over all ranks."""
    import torch

    total = torch.zeros((), device=engine.device)
    for micro_step in range(args.gradient_accumulation):
        batch = corpus.batch(step * args.gradient_accumulation + micro_step, args.micro_batch, RANK, WORLD)
        batch = batch.to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    torch.distributed.all_reduce(total)
    return total.item() / (args.gradient_accumulation * WORLD)


def report(args: Namespace, elapsed: float) -> None:
    """Throughput as DeepSpeed-Chat defines it, with gradient accumulation: samples of all ranks per second."""
    steps = args.steps - args.warmup_steps
    samples = steps * tokens_per_step(args) / args.sequence_length
    say(f"Execution time: {elapsed:.3f} seconds for {steps} steps")
    say(f"Throughput: {samples / elapsed:.4f} samples/sec")
    say(f"Tokens: {samples * args.sequence_length / elapsed:.1f} tokens/sec")


def tokens_per_step(args: Namespace) -> int:
    """Tokens that one step of the optimiser sees, over all ranks."""
    return int(args.gradient_accumulation * args.micro_batch * args.sequence_length * WORLD)


def synchronised_time() -> float:
    """Seconds on this rank's clock once every rank and its device have finished what they were given."""
    import torch
    from deepspeed.accelerator import get_accelerator

    get_accelerator().synchronize()
    torch.distributed.barrier()
    return time.perf_counter()


def save(engine: Any, model: Any, tokenizer: Any, args: Namespace) -> None:
    """Write the trained weights, the configuration and the tokeniser; all ranks take part, rank 0 writes."""
    engine.save_16bit_model(str(args.output), exclude_frozen_parameters=args.lora_dim > 0)
    if RANK == 0:
        model.config.save_pretrained(args.output)
        tokenizer.save(str(args.output / "tokenizer.json"))
    say(f"saved to {args.output}")


def say(text: str) -> None:
    """Print on rank 0 alone."""
    if RANK == 0:
        print(text, flush=True)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Gloo's threads may still hold tensors here; freeing them while Python shuts down aborts one run in thirty.
    os._exit(status)
