"""Proximal policy optimisation (Schulman et al., 2017) on answers of a language model; tensors are (batch, answer)."""

from __future__ import annotations

import torch

CLIP = 0.2
"""Limit on the change of a probability's ratio, or of a value, in one update."""
LARGEST_SCORE = 5.0
DISCOUNT, TRACE = 1.0, 0.95
"""gamma and lambda of generalised advantage estimation; answers are short, so nothing is discounted."""


def log_probabilities(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each id under the logits before it, (batch, answer, vocabulary) -> (batch, answer)."""
    return -torch.nn.functional.cross_entropy(logits.float().transpose(1, 2), ids, reduction="none")


def answer_mask(answers: torch.Tensor, eos: int) -> torch.Tensor:
    """1 up to the first </s> and on it, 0 behind."""
    ended = (answers == eos).long().cumsum(dim=1)
    return ((ended == 0) | ((ended == 1) & (answers == eos))).float()


def rewards(scores: torch.Tensor, drift: torch.Tensor, mask: torch.Tensor, kl_coefficient: float) -> torch.Tensor:
    """Per token the price of its drift from the reference (log-ratio, nats); on the last, the score (batch) as well."""
    per_token = -kl_coefficient * drift * mask
    last = mask.sum(dim=1).long() - 1
    rows = torch.arange(len(scores), device=scores.device)
    per_token[rows, last] += scores.clamp(-LARGEST_SCORE, LARGEST_SCORE)
    return per_token


def advantages(values: torch.Tensor, reward: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimates (Schulman et al., 2016) and the returns that the values should have been."""
    values, reward = values * mask, reward * mask
    estimates = torch.zeros_like(values)
    following, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for index in reversed(range(values.shape[1])):
        surprise = reward[:, index] + DISCOUNT * next_value - values[:, index]
        following = surprise + DISCOUNT * TRACE * following
        estimates[:, index], next_value = following, values[:, index]
    return estimates, estimates + values


def policy_loss(new: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The clipped surrogate, negated: ratios beyond the clip gain nothing more."""
    ratio = ((new - old) * mask).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return masked_mean(torch.maximum(-advantage * ratio, -advantage * clipped), mask)


def value_loss(new: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Half the squared error, of the value or of its clipped move, whichever is worse."""
    clipped = old + (new - old).clamp(-CLIP, CLIP)
    return masked_mean(0.5 * torch.maximum((new - returns) ** 2, (clipped - returns) ** 2), mask)


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean of the values where the mask is 1."""
    return (values * mask).sum() / mask.sum()
