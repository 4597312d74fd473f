"""Training: recipes, optimizer, schedules, the loop, checkpoints, the report."""

from phylon.spec.package import make_callable
from phylon.train.adafactor import Adafactor
from phylon.train.callbacks import Callback
from phylon.train.checkpoint import RunState, latest_checkpoint
from phylon.train.forecast import Estimate, estimate
from phylon.train.metrics import read_metrics
from phylon.train.muon import Muon
from phylon.train.objectives import NextToken, Objective
from phylon.train.optim import AdamW
from phylon.train.progress import ProgressLine
from phylon.train.recipe import (
    DataRecipe,
    Recipe,
    RunRecipe,
    TuneRecipe,
    builtin_recipes,
    load_recipe,
    recipe_from_toml,
    recipe_to_toml,
)
from phylon.train.report import write_report
from phylon.train.run import TrainResult, train
from phylon.train.schedule import WSD, Constant, InverseSqrt, Linear, WarmupCosine
from phylon.train.signals import Interrupted
from phylon.train.spikes import RollBack, SkipBatch
from phylon.train.tensorboard import TensorBoard
from phylon.train.trainer import Trainer
from phylon.train.vocabulary import BPE, Characters, Loaded, Unigram, WordPiece

__all__ = [
    "BPE",
    "WSD",
    "Adafactor",
    "AdamW",
    "Callback",
    "Characters",
    "Constant",
    "DataRecipe",
    "Estimate",
    "Interrupted",
    "InverseSqrt",
    "Linear",
    "Loaded",
    "Muon",
    "NextToken",
    "Objective",
    "ProgressLine",
    "Recipe",
    "RollBack",
    "RunRecipe",
    "RunState",
    "SkipBatch",
    "TensorBoard",
    "TrainResult",
    "Trainer",
    "TuneRecipe",
    "Unigram",
    "WarmupCosine",
    "WordPiece",
    "builtin_recipes",
    "estimate",
    "latest_checkpoint",
    "load_recipe",
    "read_metrics",
    "recipe_from_toml",
    "recipe_to_toml",
    "train",
    "write_report",
]

make_callable(__name__)
