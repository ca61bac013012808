"""Proximal policy optimisation (Schulman et al., 2017) on answers of a language model; tensors are (batch, answer)."""

from __future__ import annotations

import torch

CLIP = 0.2
"""Limit on the change of a probability's ratio, or of a value, in one update."""
LARGEST_SCORE = 5.0
DISCOUNT, TRACE = 1.0, 0.95
"""gamma and lambda of generalised advantage estimation; answers are short, so nothing is discounted."""


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return each id's log-probability under its logits, (batch, answer, vocabulary) -> (batch, answer)."""
    return -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids, reduction="none")


def answer_mask(answers: torch.Tensor, eos: int) -> torch.Tensor:
    """Return 1 for each token up to and including the first </s>, 0 behind it."""
    ended = (answers == eos).long().cumsum(dim=1)
    return ((ended == 0) | ((ended == 1) & (answers == eos))).float()


def rewards(scores: torch.Tensor, drift: torch.Tensor, mask: torch.Tensor, kl_coefficient: float) -> torch.Tensor:
    """Return each token's reward: minus KL price times drift, plus the clamped score on the last token."""
    per_token = -kl_coefficient * drift * mask
    last = mask.sum(dim=1).long() - 1
    rows = torch.arange(len(scores), device=scores.device)
    per_token[rows, last] += scores.clamp(-LARGEST_SCORE, LARGEST_SCORE)
    return per_token


def advantages(values: torch.Tensor, reward: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return generalised advantage estimates (Schulman et al., 2016) and the returns."""
    values, reward = values * mask, reward * mask
    estimates = torch.zeros_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for index in reversed(range(values.shape[1])):
        surprise = reward[:, index] + DISCOUNT * next_value - values[:, index]
        following = surprise + DISCOUNT * TRACE * following
        estimates[:, index], next_value = following, values[:, index]
    return estimates, estimates + values


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return PPO's clipped policy loss, the mean over masked tokens."""
    ratio = ((new - old) * mask).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), mask)


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return half the squared error of the values, clipped or not, the larger; the mean over masked tokens."""
    clipped = old + (new - old).clamp(-CLIP, CLIP)
    return masked_mean(0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2), mask)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of the values where the mask is 1."""
    return (values * mask).sum() / mask.sum()
