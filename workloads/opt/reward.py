"""A reward model: OPT with one number per token, taught by pairs which of two answers people prefer."""

from __future__ import annotations

from typing import Any

import flops
import loop
import torch
from checkpoints import Checkpoints
from engines import save, trained
from lora import add_lora
from model import ValueModel, build
from pairs import CorpusPairs, DatasetPairs, load_pairs
from rank_group import RANK, WORLD, agree, mean, say
from setting import Setting
from shapes import lora_parameters
from torch.nn import functional


def run(setting: Setting) -> None:
    """Train a reward model on this rank with the others; print its late accuracy, save it to ``--output``."""
    args, ds, config = setting.args, setting.ds, setting.config
    samples = ds.micro_batch * ds.accumulation * WORLD
    pairs, text = load_pairs(setting, args.steps * samples)
    facts = {"pairs": pairs.fingerprint()}
    agree(facts)
    setting.announce(text)

    torch.manual_seed(args.seed)
    model = build(ValueModel, config, ds.content, setting.weights, dropout=not args.disable_dropout)
    if args.lora_dim:
        add_lora(model, args.lora_dim, tuple(args.lora_modules))
        model.value_head.requires_grad_(True)
    engine = trained(model, ds.content, args.learning_rate, args)

    torch.manual_seed(args.seed + RANK)
    adapters = lora_parameters(config, args.lora_dim, tuple(args.lora_modules))
    tokens = samples * 2 * args.sequence_length
    operations = tokens * flops.train(config, args.sequence_length, adapters, values=True)
    work = loop.Work(samples, tokens, setting.operations(operations))
    saved = Checkpoints({"model": engine}, args, facts, adapters_only=args.lora_dim > 0)
    steps = loop.run(args, work, lambda number: step(engine, pairs, number, setting), saved)
    late = steps[-max(1, len(steps) // 4) :]
    say(f"Accuracy: {sum(one.more['accuracy'] for one in late) / len(late):.4f} in the last {len(late)} steps")
    if args.output:
        save(engine, setting.tokenizer, args.output, adapters_only=args.lora_dim > 0)


def step(engine: Any, pairs: DatasetPairs | CorpusPairs, number: int, setting: Setting) -> loop.Step:
    """Take one optimizer step; return the loss and the pairs' accuracy, means over micro-batches and ranks."""
    learning_rate = engine.get_lr()[0]
    loss, right = torch.zeros((), device=engine.device), torch.zeros((), device=engine.device)
    for micro_step in range(number * setting.ds.accumulation, (number + 1) * setting.ds.accumulation):
        batch = pairs.batch(micro_step, setting.ds.micro_batch, RANK, WORLD)
        # Padding follows the text and attention looks back only, so no mask is needed.
        values = engine(batch.ids.to(engine.device))
        scores = values.gather(1, batch.last.to(engine.device)[:, None])
        margin = torch.sub(*scores.chunk(2))
        micro_loss = -functional.logsigmoid(margin).mean()
        engine.backward(micro_loss)
        engine.step()
        loss += micro_loss.detach()
        right += (margin > 0).float().mean()
    loss_mean, accuracy = (total / setting.ds.accumulation for total in mean(loss, right))
    return loop.Step(loss_mean, learning_rate, {"accuracy": accuracy})
