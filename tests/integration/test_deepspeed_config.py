"""labctl's list of DeepSpeed keys, compared with the DeepSpeed of the image."""

from __future__ import annotations

import json

import pytest
from support.harness import Lab

from labctl.workloads import deepspeed_config

pytestmark = pytest.mark.docker

ASK = """
import json
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
models = {"zero_optimization": DeepSpeedZeroConfig, "bf16": DeepSpeedBF16Config, "fp16": DeepSpeedFP16Config}
names = lambda model: [name for key, field in model.model_fields.items() for name in (key, field.alias) if name]
print("keys " + json.dumps({section: names(model) for section, model in models.items()}))
"""


def test_every_key_of_deepspeeds_models_is_known(lab: Lab) -> None:
    """All keys of the image's ZeRO, bf16 and fp16 models are in deepspeed_config.SECTIONS."""
    output = lab.inside("worker-0", "python", "-c", ASK)
    keys = json.loads(next(line for line in output.splitlines() if line.startswith("keys ")).removeprefix("keys "))
    assert keys.keys() == {"zero_optimization", "bf16", "fp16"}
    for section, names in keys.items():
        assert set(names) - deepspeed_config.SECTIONS[section] == set(), section
