"""``phylon verify``: the law and the checkpoint, tried on a model of the user's."""

from phylon.cli.common import Device, Dtype, Json, ModelName


def verify(model: ModelName, device: Device = "auto", dtype: Dtype = None, as_json: Json = False) -> None:
    """Check a model: its files, its weights, and that the same tokens give the same logits."""
    raise NotImplementedError
