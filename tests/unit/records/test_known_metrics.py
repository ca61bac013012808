"""Names and formats of metrics, and what must not be taken for one."""

from __future__ import annotations

import math

import pytest

from labctl.records.known_metrics import matches, name_of, stand_in


def found(text: str, *asked: str) -> dict[str, float]:
    """Return the metrics that are found in the text."""
    return {match.name: match.value for match in matches(text, asked)}


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("loss", "loss"),
        ("Loss", "loss"),
        ("lm loss", "loss"),
        ("total_loss", "loss"),
        ("Training Loss", "train_loss"),
        ("train/loss", "train_loss"),
        ("loss train", "train_loss"),
        ("valLoss", "val_loss"),
        ("Validation accuracy", "val_accuracy"),
        ("test_acc1", "test_acc1"),
        ("Acc@5", "acc5"),
        ("valid_ppl", "val_perplexity"),
        ("train_lr", "learning_rate"),
        ("gnorm", "grad_norm"),
        ("average reward score", "reward"),
        ("SamplesPerSec", "samples_per_second"),
        ("RunningAvgSamplesPerSec", "samples_per_second"),
        ("train_samples_per_second", "train_samples_per_second"),
        ("tokens_per_second_per_gpu", "tokens_per_second_per_device"),
        ("Tokens/s/device", "tokens_per_second_per_device"),
        ("img/sec", "images_per_second"),
        ("It/sec", "steps_per_second"),
        ("tps", "tokens_per_second"),
        ("TFLOP/s/device", "tflops"),
    ],
)
def test_a_name_is_known_by_all_of_its_words(text: str, name: str) -> None:
    """Name a spelling: the metric's own name."""
    assert name_of(text) == name


@pytest.mark.parametrize(
    "text",
    [
        *("value_loss", "loss scale", "best loss", "loss_cls", "nll_loss", "packet loss", "", "iou"),
        *("CurrSamplesPerSec", "train val loss", "lr_scheduler", "accuracy_cls", "s/checkpoint"),
    ],
)
def test_a_name_with_another_word_is_not_known(text: str) -> None:
    """Name text with another word: ""."""
    assert name_of(text) == ""


@pytest.mark.parametrize(
    ("text", "metrics"),
    [
        ("loss: 0.09", {"loss": 0.09}),
        ("loss=1", {"loss": 1}),
        ("step 3 loss 2.5, lr 1e-4", {"loss": 2.5, "learning_rate": 1e-4}),
        ("INFO loss: -1.5e-3.", {"loss": -1.5e-3}),
        ("step 3 loss inf acc 0.5", {"loss": math.inf, "accuracy": 0.5}),
        ("loss: Inf", {"loss": math.inf}),
        ("{'loss': 1.2, 'grad_norm': 0.5, 'epoch': 0.1}", {"loss": 1.2, "grad_norm": 0.5}),
        ("{'loss': '1.2', 'learning_rate': '1e-05'}", {"loss": 1.2, "learning_rate": 1e-5}),
        ('2026-01-02 INFO {"step": 1, "loss": 2.3}', {"loss": 2.3}),
        ("loss: tensor(2.3026, grad_fn=<NllLossBackward0>)", {"loss": 2.3026}),
        ("| loss  | 20.1 |", {"loss": 20.1}),
        ("│  test_acc  │  0.5  │", {"test_accuracy": 0.5}),
        ("Throughput: 290.3 samples/sec", {"samples_per_second": 290.3}),
        ("throughput: 290.3", {"throughput": 290.3}),
        ("1,024.5 tokens/s", {"tokens_per_second": 1024.5}),
        ("Iter #0: 16.3 img/sec per GPU", {"images_per_second_per_device": 16.3}),
        ("Img/sec per CPU: 17.2 +-1.8", {"images_per_second_per_device": 17.2}),
        ("Total img/sec on 2 CPU(s): 34.4 +-3.7", {"images_per_second": 34.4}),
        ("Accuracy: 98.2 %", {"accuracy": 98.2}),
        ("step=10, skipped=0, lr=[1e-05], mom=[0.9]", {"learning_rate": 1e-5}),
        ("Test set: Average loss: 0.5, accuracy: 0.9", {"test_loss": 0.5, "test_accuracy": 0.9}),
        ("Epoch 3 | loss: 0.5 | val_loss: 0.6", {"loss": 0.5, "val_loss": 0.6}),
        (
            "step 81/120 loss 5.6 lr 1.1e-03 tokens/s 8539",
            {"loss": 5.6, "learning_rate": 1.1e-3, "tokens_per_second": 8539},
        ),
        (
            "loss 5.6 tokens/s 8539.2 samples/s 3.2",
            {"loss": 5.6, "tokens_per_second": 8539.2, "samples_per_second": 3.2},
        ),
        ("val loss 0.6, tokens/s: 120", {"val_loss": 0.6, "tokens_per_second": 120}),
    ],
)
def test_a_metric_is_taken_from_each_known_format(text: str, metrics: dict[str, float]) -> None:
    """Search a line in each known format: names and values."""
    assert found(text) == metrics


@pytest.mark.parametrize(
    "text",
    [
        "loss=mse",
        "loss: cross_entropy",
        "lr: 0.1",
        "learning_rate = 6e-4 # max learning rate",
        "optimizer: SGD(lr=0.1, loss=0.5)",
        "Namespace(lr=0.1, loss=0.5)",
        "--loss 0.5 --lr 0.1",
        "  --loss LOSS  weight of the loss: 0.5",
        "weight of the loss (default: 1.0)",
        "python train.py --loss 0.5",
        "saving model to out/loss=0.32.ckpt",
        "'epoch=3-step=10-val_loss=0.32.ckpt' as top 1",
        "val_loss improved from inf to 0.20766, saving model",
        "Attempted loss scale: 65536, reducing to 32768",
        "loss_scale=2.000, loss scale: 1.0",
        "best loss: 0.3, target accuracy: 0.9",
        "Mean value loss: 19.7, actor loss: 0.2",
        "class 3: accuracy: 0.9",
        "        accuracy                           0.98     42404",
        "|acc        |↑  |0.5026|±  |0.0146|",
        "loss 3 of 9 packets",
        "loss: 0.5 * ce + 0.5 * kl",
        "accuracy: 12:30, loss: 3/9, loss: 5MB",
        "config {'model': {'loss': 0.5}}",
        '            "acc": 0.594,',
        "Class Images Labels P R mAP@.5",
        "the loss is small: see 0.5",
        "throughput > 5 samples/s (was -), more than >=5 samples/s",
        "throughput = 600..700",
        "throughput: 54.6 % slower, loss: 3%",
    ],
)
def test_a_false_friend_is_no_metric(text: str) -> None:
    """Search lines that only look like metrics: nothing."""
    assert found(text) == {}


def test_a_name_that_is_asked_for_is_taken_as_it_is_printed() -> None:
    """Ask for an unknown name: its value is found in text and JSON."""
    assert found("F1 score: 0.8, bleu=31.5, other: 2", "f1_score", "bleu") == {"f1_score": 0.8, "bleu": 31.5}
    assert found('{"step": 1, "my_score": 0.4}', "my_score") == {"my_score": 0.4}


def test_a_loss_or_a_throughput_is_meant_by_another_name_if_there_is_none_of_its_own() -> None:
    """Ask for a stand-in: train_loss for loss, samples or steps per second for throughput, else ""."""
    assert stand_in("loss", {"train_loss": 1, "val_loss": 2}) == "train_loss"
    assert stand_in("loss", {"val_loss": 2}) == ""
    assert stand_in("throughput", {"steps_per_second": 1, "train_samples_per_second": 2}) == "train_samples_per_second"
    assert stand_in("valid_loss", {"val_loss": 2}) == "val_loss"
