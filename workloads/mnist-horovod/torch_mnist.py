"""MNIST with PyTorch over Horovod, started on every rank: the twin of keras_mnist.py, with the same words printed."""

from __future__ import annotations

import socket
import sys
import time
from argparse import Namespace
from typing import Any

import start
from mnist import CLASSES, Images
from rank_group import cores_per_rank


def train(args: Namespace, images: Images) -> None:
    """Train with PyTorch on this rank's share of the images; rank 0 prints, and saves to ``--output`` if given."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    threads = cores_per_rank(hvd.local_size())
    torch.set_num_threads(threads)
    torch.manual_seed(args.seed + hvd.rank())
    print(f"rank {hvd.rank()}/{hvd.size()} on {socket.gethostname()}", flush=True)
    start.require_same(hvd.allgather_object(images.fingerprint()))
    say(hvd, f"world size {hvd.size()}, {'MPI' if hvd.mpi_enabled() else 'Gloo'}")
    say(hvd, f"PyTorch {torch.__version__}, {threads} threads\ndata: {images.source}")

    mine = images.shard(hvd.rank(), hvd.size())
    train_set, test_set = (tensors(torch, pair, device) for pair in (mine.train, mine.test))
    steps = start.steps_per_epoch(mine, args.batch_size)
    model = build(torch).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # Rank 0's initial weights are everyone's.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for epoch in range(args.epochs):
        say(hvd, f"Epoch {epoch + 1}/{args.epochs}")
        began = time.perf_counter()
        loss, accuracy = run_epoch(hvd, model, optimizer, train_set, epoch * steps, steps, args)
        seconds = time.perf_counter() - began
        test_loss, test_accuracy = evaluate(hvd, model, test_set, args.batch_size)
        say(
            hvd,
            f"{steps}/{steps} - {seconds:.0f}s - loss: {loss:.4f} - accuracy: {accuracy:.4f} "
            f"- val_loss: {test_loss:.4f} - val_accuracy: {test_accuracy:.4f}",
        )
        # As with Keras, without the first epoch, in which memory is first touched.
        if epoch or args.epochs == 1:
            say(hvd, f"Throughput: {steps * args.batch_size * hvd.size() / seconds:.1f} images/sec")
        if args.output and hvd.rank() == 0:
            torch.save(model.state_dict(), args.output / f"checkpoint-{epoch + 1}.pt")


def build(torch: Any) -> Any:
    """Return the network of Horovod's MNIST example, which outputs logits."""
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(12 * 12 * 64, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, CLASSES),
    )


def tensors(torch: Any, pair: tuple[Any, Any], device: Any) -> tuple[Any, Any]:
    """Return images scaled to [0, 1] with one channel, and int64 labels, on the device."""
    images, labels = (torch.tensor(array, device=device) for array in pair)
    return images[:, None].float() / 255, labels.long()


def run_epoch(
    hvd: Any, model: Any, optimizer: Any, data: tuple[Any, Any], step: int, steps: int, args: Namespace
) -> tuple[float, float]:
    """Train one epoch on this rank's images, shuffled; return the mean loss and accuracy of all ranks."""
    import torch

    model.train()
    total, right = data[0].new_zeros(()), data[0].new_zeros(())
    order = torch.randperm(len(data[0]))[: steps * args.batch_size].split(args.batch_size)
    for number, batch in enumerate(order, step):
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * warmup(number, steps * args.warmup_epochs, hvd.size())
        images, labels = data[0][batch], data[1][batch]
        optimizer.zero_grad()
        output = model(images)
        loss = torch.nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(labels)
        right += (output.argmax(1) == labels).sum()
    return average(hvd, total, right, steps * args.batch_size)


def warmup(step: int, steps: int, ranks: int) -> float:
    """Return the factor on the learning rate, rising from 1 to ``ranks`` over ``steps`` (Goyal et al., 2017)."""
    return 1 + (ranks - 1) * min(1, step / steps if steps else 1)


def evaluate(hvd: Any, model: Any, data: tuple[Any, Any], batch_size: int) -> tuple[float, float]:
    """Return the mean loss and accuracy of all ranks on the test images."""
    import torch

    model.eval()
    total, right = data[0].new_zeros(()), data[0].new_zeros(())
    with torch.no_grad():
        for images, labels in zip(data[0].split(batch_size), data[1].split(batch_size), strict=True):
            output = model(images)
            total += torch.nn.functional.cross_entropy(output, labels, reduction="sum")
            right += (output.argmax(1) == labels).sum()
    return average(hvd, total, right, len(data[0]))


def average(hvd: Any, total: Any, right: Any, count: int) -> tuple[float, float]:
    """Return the means over all ranks of a rank's summed loss and right answers, each over ``count`` images."""
    import torch

    loss, accuracy = hvd.allreduce(torch.stack([total, right]) / count, op=hvd.Average).tolist()
    return loss, accuracy


def say(hvd: Any, text: str) -> None:
    """Print on rank 0 only."""
    if hvd.rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(start.main(train))
