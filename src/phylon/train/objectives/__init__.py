"""What is learned, one objective a file. Importing registers every one of them."""

import importlib
import pkgutil

from phylon.train.objectives.base import Batch, Feed, Material, Metrics, Objective, Sampler
from phylon.train.objectives.denoising import Denoising
from phylon.train.objectives.masked_language import MaskedLanguage
from phylon.train.objectives.next_token import NextToken

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = ["Batch", "Denoising", "Feed", "MaskedLanguage", "Material", "Metrics", "NextToken", "Objective", "Sampler"]
