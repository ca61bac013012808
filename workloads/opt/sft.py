"""Supervised fine-tuning: causal language modelling on text."""

from __future__ import annotations

from typing import Any

import flops
import loop
import torch
from checkpoints import Checkpoints
from data import Corpus, load_corpus
from engines import save, trained
from lora import add_lora
from model import build
from rank_group import RANK, WORLD, agree, mean
from setting import Setting
from shapes import lora_parameters
from transformers.models.opt.modeling_opt import OPTForCausalLM


def run(setting: Setting) -> None:
    """Fine-tune on this rank with the others; save the model, or its adapters, to ``--output``."""
    args, ds, config = setting.args, setting.ds, setting.config
    sequences = ds.micro_batch * ds.accumulation * WORLD
    tokens = sequences * args.sequence_length
    corpus, text = load_corpus(args, setting.tokenizer, config, args.sequence_length, args.steps * tokens)
    facts = {"tokens": corpus.fingerprint()}
    agree(facts)
    setting.announce(text)

    torch.manual_seed(args.seed)
    model = build(OPTForCausalLM, config, ds.content, setting.weights, dropout=not args.disable_dropout)
    if args.lora_dim:
        add_lora(model, args.lora_dim, tuple(args.lora_modules))
    engine = trained(model, ds.content, args.learning_rate, args)

    torch.manual_seed(args.seed + RANK)
    adapters = lora_parameters(config, args.lora_dim, tuple(args.lora_modules))
    operations = tokens * flops.train(config, args.sequence_length, adapters)
    work = loop.Work(sequences, tokens, setting.operations(operations))
    saved = Checkpoints({"model": engine}, args, facts, adapters_only=args.lora_dim > 0)
    loop.run(args, work, lambda number: step(engine, corpus, number, setting), saved)
    if args.output:
        save(engine, setting.tokenizer, args.output, adapters_only=args.lora_dim > 0)


def step(engine: Any, corpus: Corpus, number: int, setting: Setting) -> loop.Step:
    """Take one optimizer step; return the loss, a mean over micro-batches and ranks."""
    learning_rate = engine.get_lr()[0]
    total = torch.zeros((), device=engine.device)
    for micro_step in range(number * setting.ds.accumulation, (number + 1) * setting.ds.accumulation):
        batch = corpus.batch(micro_step, setting.ds.micro_batch, RANK, WORLD).to(engine.device)
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        total += loss.detach().float()
    return loop.Step(mean(total)[0] / setting.ds.accumulation, learning_rate)
