"""The data room: corpora tokenised once, packed or paired, in an order that resumes exactly; prompts to decode."""

from masw_lightning.data.corpora import Source
from masw_lightning.data.datamodule import LongContextDataModule
from masw_lightning.data.longbench import PromptSource, check_prompt_fits

__all__ = ["LongContextDataModule", "PromptSource", "Source", "check_prompt_fits"]
