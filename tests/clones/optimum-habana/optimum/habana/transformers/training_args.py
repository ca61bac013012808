"""Options that the examples share, beside those of transformers."""

from dataclasses import dataclass


@dataclass
class GaudiTrainingArguments:
    use_habana: bool = False
    use_lazy_mode: bool = True
    use_hpu_graphs_for_inference: bool = False
    gaudi_config_name: str = ""
    throughput_warmup_steps: int = 0
