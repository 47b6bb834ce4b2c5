"""The published models by name, and the one place where a network is put together from plain settings."""

from dataclasses import asdict, dataclass, replace

from torch import nn

from utils.errors import InputError


@dataclass(frozen=True)
class ModelSettings:
    """What makes a model.

    `align_corners`: of every resize, with inputs of 16k + 1 pixels a side, else 16k; an encoder that takes only the
    other gets the other. `memory_gap_*`: every n-th frame enters the long-term memory, None: reference frames only.
    """

    family: str  # aot or deaot
    encoder: str  # a name of models/encoders.py, or timm/<name>
    layers: int
    align_corners: bool = True
    memory_gap_train: int | None = None
    memory_gap_test: int | None = None
    group_size: int = 10  # objects tracked together; they share an identity bank
    max_long_edge: int = 1040  # frames are shrunk to it for the network; 1.3 x 800 in the published evaluation
    object_edge: int | None = None  # frames are enlarged for small objects, see models.tracker.enlargement


def _family(family: str) -> dict[str, ModelSettings]:
    small = {
        f"{family}{size}": ModelSettings(family, "mobilenetv2", layers)
        for size, layers in (("t", 1), ("s", 2), ("b", 3))
    }
    encoders = {"": "mobilenetv2", "r50_": "resnet50", "swinb_": "swin_base"}
    if family == "aot":
        encoders |= {"r101_": "resnet101", "rs101_": "resnest101"}
    large = {
        f"{prefix}{family}l": ModelSettings(family, encoder, 3, encoder != "swin_base", 2, 5)
        for prefix, encoder in encoders.items()
    }
    return small | large


# Settings come with weight files, too: none may take the memory of a machine.
_RANGES = {
    "family": (str, 0, 0),
    "encoder": (str, 0, 0),
    "layers": (int, 1, 32),
    "align_corners": (bool, 0, 0),
    "memory_gap_train": (int, 1, 10**6),
    "memory_gap_test": (int, 1, 10**6),
    "group_size": (int, 1, 10),
    "max_long_edge": (int, 16, 2**16),
    "object_edge": (int, 1, 2**16),
}

# Both papers' model zoos; r101 and rs101 from the public code's configurations.
PUBLISHED = _family("aot") | _family("deaot")


def list_models() -> list[str]:
    """Names of the published models."""
    return sorted(PUBLISHED)


def model_settings(name: str, **overrides: object) -> ModelSettings:
    """Settings of a published model with some of them replaced, e.g. encoder="timm/efficientnet_lite0".

    Raises:
        InputError: no such model or setting.
    """
    import difflib

    key = name.lower()
    if key not in PUBLISHED:
        near = difflib.get_close_matches(key, PUBLISHED, n=1)
        hint = f"did you mean {near[0]}?" if near else "choose one of"
        raise InputError(f"model {name!r} is not known: {hint} ({', '.join(list_models())})")
    unknown = sorted(set(overrides) - set(asdict(PUBLISHED[key])))
    if unknown:
        raise InputError(f"model setting {unknown[0]!r} is not known: choose from {', '.join(asdict(PUBLISHED[key]))}")
    for setting, (kind, least, most) in _RANGES.items():
        value = overrides.get(setting)
        if value is not None and not (type(value) is kind and (kind is not int or least <= value <= most)):
            right = f"a whole number from {least} to {most}" if kind is int else f"a {kind.__name__}"
            raise InputError(f"model setting {setting}={value!r}: must be {right}")
    settings = replace(PUBLISHED[key], **overrides)
    if settings.family not in ("aot", "deaot") or None in (settings.layers, settings.encoder, settings.align_corners):
        raise InputError(f"model settings {overrides}: family (aot, deaot), encoder, layers, align_corners are needed")
    return settings


def build_model(name: str, **overrides: object) -> nn.Module:
    """Build a model with random weights.

    Args:
        name: a published model, lower case, e.g. "r50_deaotl".
        overrides: settings that differ from the published ones (see ModelSettings).

    Returns:
        A VOSNetwork in eval mode; `model.name` and `model.settings` say what it is.

    Raises:
        InputError: unknown name, setting or encoder.
    """
    import torch

    from models.aot import AOTTransformer
    from models.deaot import DeAOTTransformer
    from models.decoder import Decoder
    from models.encoders import build_encoder
    from models.network import SLOTS, VOSNetwork

    with torch.inference_mode(False):  # a model built in inference mode could never be trained
        settings = model_settings(name, **overrides)
        encoder = build_encoder(settings.encoder)
        if settings.align_corners not in encoder.align_corners:
            if "align_corners" in overrides:
                raise InputError(
                    f"align_corners={settings.align_corners} does not fit encoder {settings.encoder}: leave it out"
                )
            settings = replace(settings, align_corners=not settings.align_corners)
        transformer = {"aot": AOTTransformer, "deaot": DeAOTTransformer}[settings.family](settings.layers)
        model = VOSNetwork(
            encoder,
            transformer,
            Decoder(transformer.output_width, encoder.channels, SLOTS + 1, settings.align_corners),
            align_corners=settings.align_corners,
            identity_norm=settings.family == "deaot",
            train_memory_gap=settings.memory_gap_train,
            test_memory_gap=settings.memory_gap_test,
            max_long_edge=settings.max_long_edge,
            group_size=settings.group_size,
            object_edge=settings.object_edge,
        )
        model.name, model.settings = name.lower(), settings
        # Tokens lie channels last in memory, so that the convolutions that meet them need no reordering.
        for part in (model.encoder, model.encoder_projector, model.transformer, model.decoder):
            part.to(memory_format=torch.channels_last)
    return model.eval()
