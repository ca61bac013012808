"""LoRA fine-tuning (Hu et al., 2021) of a causal language model under DeepSpeed, started on every rank."""

from __future__ import annotations

import math
import os
import sys
import time
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import arguments
from checkpoints import Checkpoints, Progress
from deepspeed_file import read_config
from rank_group import RANK, WORLD, agree, fingerprint, join, say, set_up, synchronised_time
from script_exit import InputError, run_and_exit

if TYPE_CHECKING:
    import torch

UNTIMED_STEPS = 3


def main() -> None:
    """Parse and check the arguments, then train on this rank."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    args = arguments.parse()
    arguments.check(args)
    train(args, read_config(args.deepspeed_config))


def train(args: Namespace, config: dict[str, Any]) -> None:
    """Train on this rank: load texts and model, print perplexity before and after, save the adapters."""
    import deepspeed
    import torch
    import transformers
    from device import refuse_unsupported
    from model import build, counts, load_shape, load_tokenizer, precision
    from sequences import split

    set_up()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    refuse_unsupported(config)
    tokenizer = load_tokenizer(args.model)
    shape = load_shape(args, tokenizer)
    sequences = prepare(args, tokenizer, shape)
    training, validation = split(sequences, args.validation_percentage)
    say(f"sequences: {len(training)} to train on, {len(validation)} to validate on")

    say(f"precision: {precision(config)}")

    torch.manual_seed(args.seed)
    model = build(args, shape, config)
    trained, total = counts(model)
    say(f"parameters: {trained} trained of {total} ({100 * trained / total:.3f} %)")
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = None if "optimizer" in config else torch.optim.AdamW(adapters, lr=args.learning_rate)
    config = {"steps_per_print": sys.maxsize, **config}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, model_parameters=adapters, config=config)

    steps = count_steps(args, len(training), engine.train_batch_size())
    # As the optimiser was made: a checkpoint has those of its step.
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    saved = Checkpoints({"model": engine}, args, {"text": fingerprint(sequences)}, adapters_only=True)
    torch.manual_seed(args.seed + RANK)
    progress = saved.load(steps) or {"step": 0, "first": "", "perplexity": perplexity(engine, validation)}
    say(f"perplexity: {progress['perplexity']:.4f} before training")
    seconds, timed = run_steps(engine, training, steps, rates, args, saved, progress)
    say(f"Execution time: {seconds:.3f} seconds for {timed} steps")
    say(f"Throughput: {timed * engine.train_batch_size() / seconds:.4f} samples/sec")
    say(f"perplexity: {perplexity(engine, validation):.4f} after training")
    save(engine, args)
    torch.distributed.destroy_process_group()


def prepare(args: Namespace, tokenizer: Any, shape: Any) -> torch.Tensor:
    """Tokenise the texts, join the other ranks, check that all hold the same; return the sequences."""
    import texts
    from sequences import tokenise

    source, found = texts.load(args.data, args.dataset)
    sequences = tokenise(found, tokenizer, args.sequence_length)
    if len(sequences) and (largest := int(sequences.max())) >= shape.vocab_size:
        raise InputError(f"the tokeniser gave id {largest}, beyond the model's vocabulary of {shape.vocab_size}")
    join()
    agree({"text": fingerprint(sequences), "model": shape.to_json_string()})

    random = "a small Llama with random weights, tokens are bytes (--model DIR takes a real one)"
    say(f"world size {WORLD}")
    say(f"model: {args.model or random}")
    say(f"data: {source}")
    return sequences


def count_steps(args: Namespace, sequences: int, batch: int) -> int:
    """Return the optimizer steps of all epochs, at most ``--max-steps``. InputError if the data fill no batch."""
    steps = sequences // batch * args.epochs
    if not steps:
        raise InputError(f"{sequences} sequences of {args.sequence_length} tokens are fewer than one batch of {batch}")
    return min(steps, args.max_steps or steps)


def run_steps(
    engine: Any,
    training: torch.Tensor,
    steps: int,
    rates: list[float],
    args: Namespace,
    saved: Checkpoints,
    progress: Progress,
) -> tuple[float, int]:
    """Train from the checkpoint's step on, print and save each step; return the timed steps' seconds and number."""
    from sequences import batches

    batch, done = engine.train_batch_size(), progress["step"]
    own = batches(training, engine.train_micro_batch_size_per_gpu(), batch, args.seed, RANK, WORLD)
    own = islice(own, done * engine.gradient_accumulation_steps(), None)
    warmup, untimed = math.ceil(args.warmup_ratio * steps), min(done + UNTIMED_STEPS, steps - 1)
    groups = list(zip(engine.optimizer.param_groups, rates, strict=True))
    if first := progress["first"]:
        say(first)

    def progress_now() -> Progress:
        """Return the progress to store in a checkpoint."""
        return {**progress, "step": step, "first": first}

    started = synchronised_time()
    engine.train()
    for step in range(done + 1, steps + 1):
        if step == untimed + 1:
            started = synchronised_time()
        step_started = time.perf_counter()
        for group, rate in groups if engine.lr_scheduler is None else ():
            group["lr"] = rate * min(1, step / (warmup + 1))
        loss = train_step(engine, own)
        speed = batch * args.sequence_length / (time.perf_counter() - step_started)
        line = f"step {step}/{steps} loss {loss:.4f} tokens/s {speed:.0f}"
        say(line)
        first = first or line
        saved.after(step, steps, progress_now)
    return synchronised_time() - started, steps - untimed


def train_step(engine: Any, own: Any) -> float:
    """Take one step of the optimiser; return the loss, a mean over micro-batches and ranks."""
    import torch

    total = torch.zeros((), device=engine.device)
    for _ in range(engine.gradient_accumulation_steps()):
        batch = next(own).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    torch.distributed.all_reduce(total)
    return total.item() / (engine.gradient_accumulation_steps() * WORLD)


def perplexity(engine: Any, validation: torch.Tensor) -> float:
    """Return exp of the mean loss over the validation sequences of all ranks; inf if it is too large."""
    import torch
    from sequences import validation_batches

    total = torch.zeros(2, device=engine.device)
    engine.eval()
    with torch.no_grad():
        for batch, counted in validation_batches(validation, engine.train_micro_batch_size_per_gpu(), RANK, WORLD):
            loss = engine(input_ids=batch.to(engine.device), labels=batch.to(engine.device)).loss.float()
            total += torch.stack([loss * counted, torch.full_like(loss, counted)])
    torch.distributed.all_reduce(total)
    loss = total[0].item() / total[1].item()
    return math.exp(loss) if loss < 700 else math.inf


def save(engine: Any, args: Namespace) -> None:
    """Write the adapters in peft's format below the run's directory; all ranks take part, rank 0 writes."""
    import deepspeed

    directory = Path(os.environ.get("LABCTL_RUN_DIR", ".")) / args.output
    adapters = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
    with deepspeed.zero.GatheredParameters(adapters, enabled=engine.zero_optimization_stage() == 3):
        if RANK == 0:
            engine.module.save_pretrained(directory, save_embedding_layers=False)
    say(f"saved to {directory}")


if __name__ == "__main__":
    run_and_exit(main)
