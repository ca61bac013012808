"""MNIST with Keras over Horovod, started on every rank: the classic example, with data that needs no network."""

from __future__ import annotations

import socket
import sys
import time
from argparse import Namespace
from typing import Any

import start
from mnist import CLASSES, SIDE, Images
from rank_group import cores_per_rank


def train(args: Namespace, images: Images) -> None:
    """Train with Keras on this rank's share of the images; rank 0 prints, and saves to ``--output`` if given."""
    import horovod.tensorflow.keras as hvd
    import tensorflow as tf
    from horovod.tensorflow import allgather_object

    hvd.init()
    for kind in ("GPU", "XPU"):
        if devices := tf.config.list_physical_devices(kind):
            device = devices[hvd.local_rank()]
            tf.config.experimental.set_memory_growth(device, True)
            tf.config.set_visible_devices(device, kind)
    threads = cores_per_rank(hvd.local_size())
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.keras.utils.set_random_seed(args.seed + hvd.rank())
    print(f"rank {hvd.rank()}/{hvd.size()} on {socket.gethostname()}", flush=True)
    start.require_same(allgather_object(images.fingerprint()))
    if hvd.rank() == 0:
        print(f"world size {hvd.size()}, {'MPI' if hvd.mpi_enabled() else 'Gloo'}", flush=True)
        print(f"TensorFlow {tf.__version__}, {threads} threads\ndata: {images.source}", flush=True)

    mine = images.shard(hvd.rank(), hvd.size())
    steps = start.steps_per_epoch(mine, args.batch_size)
    # The sum of all ranks' batches is one step, so the rate grows with them.
    rate = args.learning_rate * hvd.size()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(rate))
    model = build(tf)
    model.compile(loss="sparse_categorical_crossentropy", optimizer=optimizer, metrics=["accuracy"])
    callbacks = [
        # Rank 0's initial weights are everyone's, and its printed numbers those of all ranks.
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=args.warmup_epochs, steps_per_epoch=steps),
        clock(tf, images_per_epoch=steps * args.batch_size * hvd.size(), told=hvd.rank() == 0),
    ]
    if args.output and hvd.rank() == 0:
        callbacks.append(tf.keras.callbacks.ModelCheckpoint(str(args.output / "checkpoint-{epoch}.h5")))
    model.fit(
        dataset(tf, mine.train).shuffle(len(mine.train[0])).batch(args.batch_size).repeat(),
        validation_data=dataset(tf, mine.test).batch(args.batch_size),
        steps_per_epoch=steps,
        epochs=args.epochs,
        callbacks=callbacks,
        # A line for each epoch.
        verbose=2 if hvd.rank() == 0 else 0,
    )


def build(tf: Any) -> Any:
    """Return the uncompiled network of Horovod's MNIST example."""
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [
            layers.Conv2D(32, 3, activation="relu", input_shape=(SIDE, SIDE, 1)),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(2),
            layers.Dropout(0.25),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dropout(0.5),
            layers.Dense(CLASSES, activation="softmax"),
        ]
    )


def dataset(tf: Any, pair: tuple[Any, Any]) -> Any:
    """Return a tf.data set of images scaled to [0, 1], with one channel, and int64 labels."""
    return tf.data.Dataset.from_tensor_slices(pair).map(
        lambda image, label: (tf.cast(image, tf.float32)[..., tf.newaxis] / 255, tf.cast(label, tf.int64))
    )


def clock(tf: Any, *, images_per_epoch: int, told: bool) -> Any:
    """Return a callback that prints all ranks' images per second if ``told``, not for the first of several epochs."""

    class Clock(tf.keras.callbacks.Callback):
        def on_epoch_begin(self, *_: Any) -> None:
            self.began = time.perf_counter()

        def on_test_begin(self, *_: Any) -> None:
            self.seconds = time.perf_counter() - self.began

        def on_epoch_end(self, epoch: int, *_: Any) -> None:
            if told and (epoch or self.params["epochs"] == 1):
                print(f"Throughput: {images_per_epoch / self.seconds:.1f} images/sec", flush=True)

    return Clock()


if __name__ == "__main__":
    sys.exit(start.main(train))
