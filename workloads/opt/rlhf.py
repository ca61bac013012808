"""Reinforcement learning from a reward model: an actor writes answers and is moved, by PPO, to what scores better."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import deepspeed
import flops
import loop
import ppo
import torch
import transformers
from checkpoints import Checkpoints
from deepspeed.accelerator import get_accelerator
from engines import frozen, save, trained
from lora import add_lora
from model import ValueModel, build
from pairs import Prompts, load_prompts
from rank_group import RANK, WORLD, agree, mean, say
from setting import Setting
from shapes import lora_parameters
from torch import nn
from transformers.models.opt.modeling_opt import OPTForCausalLM


def run(setting: Setting) -> None:
    """Train actor and critic with PPO on this rank with the others; print the reward gain, save the actor."""
    args, ds = setting.args, setting.ds
    samples = ds.micro_batch * ds.accumulation * WORLD
    prompts, text = load_prompts(setting, args.steps * samples)
    facts = {"prompts": prompts.fingerprint()}
    agree(facts)
    setting.announce(text)
    if ds.hybrid_engine:
        say(
            f"hybrid engine: not used, as {without_hybrid_engine()}; "
            "all weights are gathered once for the answers instead"
        )

    models = build_models(setting)
    torch.manual_seed(args.seed + RANK)
    tokens = samples * (args.max_prompt_length + args.max_answer_length)
    work = loop.Work(samples, tokens, setting.operations(tokens * operations(setting)))
    engines = {"actor": models.actor, "critic": models.critic}
    saved = Checkpoints(engines, args, facts, adapters_only=args.lora_dim > 0)
    steps = loop.run(args, work, lambda number: step(models, prompts, number, setting), saved)
    part = max(1, len(steps) // 4)
    first, last = (sum(one.more["reward"] for one in some) / part for some in (steps[:part], steps[-part:]))
    say(f"Reward gain: {last - first:.4f}, from {first:.4f} in the first {part} steps to {last:.4f} in the last {part}")
    if args.output:
        save(models.actor, setting.tokenizer, args.output, adapters_only=args.lora_dim > 0)


def without_hybrid_engine() -> str:
    """Return the reason why DeepSpeed's hybrid engine does not run here."""
    if get_accelerator().device_name() != "cuda":
        return f"its kernels need CUDA, and this is {get_accelerator().device_name()}"
    return f"DeepSpeed has no kernels for the OPT layers of transformers {transformers.__version__}"


@dataclass(frozen=True)
class Models:
    """The four models of PPO, and the actor once more without hooks, for generating: both share their weights."""

    actor: Any
    writer: nn.Module
    reference: Any
    critic: Any
    reward: Any


@dataclass(frozen=True)
class Experience:
    """Answers and what was thought of them before learning; (batch, answer), ``ids`` with the prompt in front."""

    ids: torch.Tensor
    attention: torch.Tensor | None
    mask: torch.Tensor
    log_probabilities: torch.Tensor
    drift: torch.Tensor
    """Log-probabilities less those of the reference."""
    values: torch.Tensor
    scores: torch.Tensor
    """(batch), from the reward model."""


def build_models(setting: Setting) -> Models:
    """Build actor and its reference from the same weights, critic and reward model from the critic's."""
    args, ds = setting.args, setting.ds
    critic_stage = ds.stage if args.critic_zero_stage is None else args.critic_zero_stage
    critic_ds = ds.at_stage(critic_stage)

    def make(kind: Any, config: Any, ds_config: Any, weights: Any) -> Any:
        """Build a model with the run's seed, so that equal kinds start equal."""
        torch.manual_seed(args.seed)
        return build(kind, config, ds_config, weights, dropout=False)

    actor = make(OPTForCausalLM, setting.config, ds.content, setting.weights)
    if args.lora_dim:
        add_lora(actor, args.lora_dim, tuple(args.lora_modules))
    # A copy of the modules that holds the same parameters: ZeRO-3 hooks the actor's modules to gather weights layer by
    # layer, for every token anew; the copy is free of hooks and runs while all are gathered.
    writer = copy.deepcopy(actor, {id(parameter): parameter for parameter in actor.parameters()}).eval()
    reference = make(OPTForCausalLM, setting.config, ds.content, setting.weights)
    critic = make(ValueModel, setting.critic, critic_ds, setting.critic_weights)
    reward = make(ValueModel, setting.critic, critic_ds, setting.critic_weights)
    return Models(
        actor=trained(actor, ds.content, args.learning_rate, args, args.ppo_epochs),
        writer=writer,
        reference=frozen(reference, ds.at_stage(ds.stage), setting.dtype),
        critic=trained(critic, critic_ds, args.critic_learning_rate, args, args.ppo_epochs),
        reward=frozen(reward, ds.at_stage(critic_stage), setting.dtype),
    )


def step(models: Models, prompts: Prompts, number: int, setting: Setting) -> loop.Step:
    """Write and score answers and learn from them; return reward, losses and KL, means over ranks."""
    args, accumulation = setting.args, setting.ds.accumulation
    learning_rate = models.actor.get_lr()[0]
    numbers = range(number * accumulation, (number + 1) * accumulation)
    batches = [prompts.batch(one, setting.ds.micro_batch, RANK, WORLD) for one in numbers]
    told = [experience(models, *batch, setting) for batch in batches]
    losses = [learn(models, one, args.kl_coefficient) for _ in range(args.ppo_epochs) for one in told]
    policy, value = (torch.stack(some).mean() for some in zip(*losses, strict=True))
    score = torch.cat([one.scores for one in told]).mean()
    drift = torch.stack([(one.drift * one.mask).sum(dim=1).mean() for one in told]).mean()
    loss, critic_loss, reward, kl = mean(policy, value, score, drift)
    return loop.Step(loss, learning_rate, {"reward": reward, "critic_loss": critic_loss, "kl": kl})


@torch.no_grad()
def experience(models: Models, prompts: torch.Tensor, mask: torch.Tensor | None, setting: Setting) -> Experience:
    """Generate answers; return them with the log-probabilities, values and scores that the models give."""
    length = setting.args.max_answer_length
    device = models.actor.device
    prompts, mask = prompts.to(device), mask if mask is None else mask.to(device)
    with deepspeed.zero.GatheredParameters(list(models.writer.parameters()), enabled=setting.ds.stage == 3):
        ids, attention = write(models.writer, prompts, mask, length)
        old = answer_log_probabilities(models.writer, ids, attention, length)
    reference = answer_log_probabilities(models.reference, ids, attention, length)
    models.critic.eval()
    answer = ppo.answer_mask(ids[:, -length:], setting.config["eos_token_id"])
    last = prompts.shape[1] + answer.sum(dim=1).long() - 1
    return Experience(
        ids=ids,
        attention=attention,
        mask=answer,
        log_probabilities=old,
        drift=old - reference,
        values=answer_values(models.critic, ids, attention, length),
        scores=models.reward(ids, attention).gather(1, last[:, None])[:, 0],
    )


def write(
    model: nn.Module, prompts: torch.Tensor, mask: torch.Tensor | None, length: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Append ``length`` sampled tokens to each prompt; return the ids and the extended mask, None if it was."""
    ids, seen, cache = prompts, prompts, None
    for _ in range(length):
        output = model(input_ids=seen, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        seen = torch.multinomial(output.logits[:, -1].float().softmax(dim=-1), 1)
        ids = torch.cat([ids, seen], dim=1)
        mask = mask if mask is None else torch.cat([mask, torch.ones_like(seen)], dim=1)
    return ids, mask


def learn(models: Models, told: Experience, kl_coefficient: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Take a PPO step of actor and critic on one micro-batch; return their losses."""
    length = told.mask.shape[1]
    reward = ppo.rewards(told.scores, told.drift, told.mask, kl_coefficient)
    advantage, returns = ppo.advantages(told.values, reward, told.mask)
    models.actor.train()
    new = answer_log_probabilities(models.actor, told.ids, told.attention, length)
    actor_loss = ppo.policy_loss(new, told.log_probabilities, advantage, told.mask)
    models.actor.backward(actor_loss)
    models.actor.step()
    models.critic.train()
    values = answer_values(models.critic, told.ids, told.attention, length)
    critic_loss = ppo.value_loss(values, told.values, returns, told.mask)
    models.critic.backward(critic_loss)
    models.critic.step()
    return actor_loss.detach(), critic_loss.detach()


def answer_log_probabilities(
    model: Any, ids: torch.Tensor, attention: torch.Tensor | None, length: int
) -> torch.Tensor:
    """Return the log-probabilities of the last ``length`` ids, each given all before it."""
    output = model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=length + 1)
    return ppo.log_probabilities(output.logits[:, :-1], ids[:, -length:])


def answer_values(model: Any, ids: torch.Tensor, attention: torch.Tensor | None, length: int) -> torch.Tensor:
    """Return the critic's values before each of the last ``length`` ids."""
    return model(ids, attention)[:, -length - 1 : -1]


def operations(setting: Setting) -> float:
    """Return a step's operations per token: passes that generate and score, and training in each PPO epoch."""
    args = setting.args
    sequence = args.max_prompt_length + args.max_answer_length
    adapters = lora_parameters(setting.config, args.lora_dim, tuple(args.lora_modules))
    asked = 3 * flops.forward(setting.config, sequence) + 2 * flops.forward(setting.critic, sequence, values=True)
    learnt = flops.train(setting.config, sequence, adapters) + flops.train(setting.critic, sequence, values=True)
    return asked + args.ppo_epochs * learnt
