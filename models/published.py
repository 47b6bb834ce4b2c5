"""How the keys of published checkpoints translate to this package's names."""

import re

# Whole model: prefix -> prefix. The modules below them keep the published names.
_PREFIXES = (
    ("LSTT.", "transformer."),
    ("patch_wise_id_bank.", "identity_bank."),
    ("id_norm.", "identity_norm."),
)

# MobileNetV2: torchvision numbers the blocks through, timm by stage.
_MOBILENET_REPEATS = (1, 2, 3, 4, 3, 3, 1)
_MOBILENET_FIRST = {"conv.0.0": "conv_dw", "conv.0.1": "bn1", "conv.1": "conv_pw", "conv.2": "bn2"}
_MOBILENET_BLOCK = {
    "conv.0.0": "conv_pw",
    "conv.0.1": "bn1",
    "conv.1.0": "conv_dw",
    "conv.1.1": "bn2",
    "conv.2": "conv_pwl",
    "conv.3": "bn3",
}
_MOBILENET_ENDS = {"0.0": "conv_stem", "0.1": "bn1", "18.0": "conv_head", "18.1": "bn2"}

# Swin: (pattern, replacement) from the official names to torchvision's.
_SWIN = (
    (r"^patch_embed\.proj\.", r"features.0.0."),
    (r"^patch_embed\.norm\.", r"features.0.2."),
    (r"^layers\.(\d+)\.blocks\.", lambda m: f"features.{2 * int(m[1]) + 1}."),
    (r"^layers\.(\d+)\.downsample\.", lambda m: f"features.{2 * int(m[1]) + 2}."),
    (r"\.mlp\.fc1\.", r".mlp.0."),
    (r"\.mlp\.fc2\.", r".mlp.3."),
    (r"^norm(\d)\.", r"norms.\1."),
)

# What ImageNet files hold beyond the encoder, by encoder (see load_encoder in utils/checkpoint.py).
IMAGENET_EXTRAS = {
    "mobilenetv2": r"^classifier\.",
    "resnet50": r"^(layer4|fc)\.",
    "resnet101": r"^(layer4|fc)\.",
    "resnest101": r"^(layer4|fc)\.",
    "swin_base": r"^(layers\.3|layers\.2\.downsample|norm|head)\.|attn_mask$",
}
# What they lack: Swin's output norms are not part of the classifier and keep their initial value.
IMAGENET_MISSING = {"swin_base": r"^norms\."}


def rename_key(key: str, encoder: str) -> str | None:
    """Published key of a whole model -> own key; None for buffers that this package computes itself."""
    if key.endswith("num_batches_tracked") or key.endswith("relative_position_index"):
        return None
    if key.startswith("encoder."):
        return "encoder." + rename_encoder_key(key.removeprefix("encoder."), encoder)
    for published, own in _PREFIXES:
        if key.startswith(published):
            return own + key.removeprefix(published)
    return key


def rename_encoder_key(key: str, encoder: str) -> str:
    """Published key of an encoder -> own key."""
    if encoder == "mobilenetv2":
        return "backbone." + _mobilenet(key)
    if encoder == "swin_base":
        for pattern, replacement in _SWIN:
            key = re.sub(pattern, replacement, key)
        return key
    return "backbone." + key


def _mobilenet(key: str) -> str:
    match = re.match(r"^features\.(\d+)\.(.*)\.(\w+)$", key)
    if not match:
        return key
    number, inner, leaf = int(match[1]), match[2], match[3]
    ends = _MOBILENET_ENDS.get(f"{number}.{inner}")
    if ends:
        return f"{ends}.{leaf}"
    stage, place = 0, number - 1
    while place >= _MOBILENET_REPEATS[stage]:
        place -= _MOBILENET_REPEATS[stage]
        stage += 1
    names = _MOBILENET_FIRST if number == 1 else _MOBILENET_BLOCK
    return f"blocks.{stage}.{place}.{names.get(inner, inner)}.{leaf}"
