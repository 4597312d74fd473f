"""What is learned, one objective a file. Importing registers every one of them."""

import importlib
import pkgutil

from phylon.train.objectives.answers import Answers
from phylon.train.objectives.base import Batch, Feed, Material, Metrics, Objective, Sampler
from phylon.train.objectives.classify import TextClasses, TextScores, WordClasses
from phylon.train.objectives.contrastive import Contrastive
from phylon.train.objectives.denoising import Denoising
from phylon.train.objectives.image_classes import ImageClasses
from phylon.train.objectives.masked_language import MaskedLanguage
from phylon.train.objectives.next_token import NextToken
from phylon.train.objectives.translation import Translation

for _module in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_module.name)

__all__ = [
    "Answers",
    "Batch",
    "Contrastive",
    "Denoising",
    "Feed",
    "ImageClasses",
    "MaskedLanguage",
    "Material",
    "Metrics",
    "NextToken",
    "Objective",
    "Sampler",
    "TextClasses",
    "TextScores",
    "Translation",
    "WordClasses",
]
