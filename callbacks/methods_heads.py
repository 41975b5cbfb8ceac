"""Rows of the prediction table that draft with a trained head on the target's hidden states: EAGLE and EAGLE-3.

A head is a folder in the layout of the public checkpoints (a download, or what a training run exported) or a training
checkpoint. The base class and the first rows are in `methods.py`.
"""

from dataclasses import dataclass
from typing import cast

from callbacks.methods import Contender, Method, Models, state_fingerprint
from masw_lightning.adapter.eagle_head import DraftHead, Eagle3Head, EagleHead
from masw_lightning.drafts.base import DraftPolicy
from masw_lightning.drafts.eagle import EagleDraft
from masw_lightning.drafts.eagle3 import Eagle3Draft
from masw_lightning.modules.attached_head import open_head


@dataclass
class Eagle(Method):
    """EAGLE, first version, drafting a chain on the target's last hidden states.

    Args:
        head: a head of this target: a folder in the public layout, or a .ckpt file of `EagleTraining`.
    """

    head: str
    name: str | None = None

    def default_name(self) -> str:
        """The method's name."""
        return "eagle"

    def build(self, models: Models) -> Contender:
        """The policy; the head's weights are recorded by a fingerprint."""
        head = open_head(self.head, models.target)
        return _contender(self, EagleDraft(models.target, cast(EagleHead, head)), head)


@dataclass
class Eagle3(Method):
    """EAGLE-3, drafting a chain on three of the target's layers, in a vocabulary of its own.

    Args:
        head: a head of this target: a folder in the public layout, or a .ckpt file of `Eagle3Training`.
    """

    head: str
    name: str | None = None

    def default_name(self) -> str:
        """The method's name."""
        return "eagle3"

    def build(self, models: Models) -> Contender:
        """The policy; the head's weights are recorded by a fingerprint."""
        head = open_head(self.head, models.target)
        return _contender(self, Eagle3Draft(models.target, cast(Eagle3Head, head)), head)


def _contender(method: Method, policy: DraftPolicy, head: DraftHead) -> Contender:
    built = method.contender(policy, weights=state_fingerprint(head.state_dict()))
    built.trained_length = head.trained_length
    return built
