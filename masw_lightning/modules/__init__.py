"""Training: LightningModules that teach a memory to a frozen backbone, and what they are made of."""

from masw_lightning.modules.base import MemoryModule
from masw_lightning.modules.eagle import EagleTraining
from masw_lightning.modules.eagle3 import Eagle3Training
from masw_lightning.modules.head_base import HeadModule
from masw_lightning.modules.pretraining import AdapterPretraining
from masw_lightning.modules.schedule import OptimizerConfig, ScheduleConfig
from masw_lightning.modules.settings import AdapterConfig, ValidationConfig
from masw_lightning.modules.sft import SupervisedFinetuning

__all__ = [
    "AdapterConfig",
    "AdapterPretraining",
    "Eagle3Training",
    "EagleTraining",
    "HeadModule",
    "MemoryModule",
    "OptimizerConfig",
    "ScheduleConfig",
    "SupervisedFinetuning",
    "ValidationConfig",
]
