"""Augmentation that follows the position: small steps for ``Feed(transform=...)``, or for a GPU with ``on_device``."""

from millrace.augment.decode import decode_on_device as decode_on_device
from millrace.augment.images import ColorJitter as ColorJitter
from millrace.augment.images import Normalize as Normalize
from millrace.augment.images import RandomCrop as RandomCrop
from millrace.augment.images import RandomFlip as RandomFlip
from millrace.augment.mix import CutMix as CutMix
from millrace.augment.mix import Mixup as Mixup
from millrace.augment.offline import augment_store as augment_store
from millrace.augment.step import Compose as Compose
from millrace.augment.step import Step as Step
from millrace.augment.step import on_device as on_device
from millrace.augment.tokens import MaskTokens as MaskTokens
from millrace.augment.tokens import ReplaceTokens as ReplaceTokens
from millrace.augment.windows import Jitter as Jitter
from millrace.augment.windows import MaskSpans as MaskSpans
from millrace.augment.windows import Scale as Scale

__all__ = [
    "ColorJitter",
    "Compose",
    "CutMix",
    "Jitter",
    "MaskSpans",
    "MaskTokens",
    "Mixup",
    "Normalize",
    "RandomCrop",
    "RandomFlip",
    "ReplaceTokens",
    "Scale",
    "Step",
    "augment_store",
    "decode_on_device",
    "on_device",
]
