"""Rank 1 skips a layer whose parameters ZeRO-3 gathers from all ranks: it still gathers when the other reduces."""

import deepspeed
import torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.expert, self.last = (torch.nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor, routed: bool) -> torch.Tensor:
        x = self.first(x)
        if routed:
            x = self.expert(x)
        return self.last(x).square().mean()  # apart


config = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
}
deepspeed.init_distributed("gloo")
engine, *_ = deepspeed.initialize(model=Model(), config=config)
for step in range(1, 7):
    print(f"step {step}/50", flush=True)
    loss = engine(torch.ones(1, 64), step < 6 or engine.global_rank != 1)
    engine.backward(loss)  # others wait
    engine.step()
