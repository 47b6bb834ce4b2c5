"""Weights in and out: published checkpoints, ImageNet files of encoders and the project's own safetensors."""

import hashlib
import json
import os
import pickle
import re
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.published import IMAGENET_EXTRAS, IMAGENET_MISSING, rename_encoder_key, rename_key
from models.registry import build_model
from utils.errors import InputError

MAX_KERNEL = 64 * 64  # places of a filter


@dataclass(frozen=True)
class LoadReport:
    """What `load_weights` did. `share`: part of the model's values that came from the file."""

    source: str
    loaded: int
    missing: list[str]
    unexpected: list[str]
    misshapen: list[str]
    share: float
    kind: str  # "ema", "raw" or "unknown"


def load_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor], partial: bool = False) -> LoadReport:
    """Load weights into a model of `build_model`.

    Takes published checkpoints (their state dict bare or under `state_dict` or `model`, keys with or without a leading
    `module.`) and the project's own safetensors.

    Args:
        model: changed in place.
        source: a file or a state dict.
        partial: load what fits and report the rest instead of refusing.

    Raises:
        InputError: unreadable file, a pickled object, or tensors missing, unexpected or misshapen (up to ten of each
            are named).
    """
    name, state, metadata = _read(source)
    if any(key.startswith(("LSTT.", "patch_wise_id_bank.")) for key in state):
        encoder = model.settings.encoder
        state = {own: tensor for key, tensor in state.items() if (own := rename_key(key, encoder)) is not None}
    return _load(model, state, name, partial, kind=metadata.get("kind", "unknown"))


def load_encoder(model: nn.Module, source: str | Path | Mapping[str, Tensor], partial: bool = False) -> LoadReport:
    """Load the ImageNet weights of a backbone into the model's encoder.

    For the published encoders these are the official files (torchvision's MobileNetV2 and ResNets, the official
    ResNeSt and Swin); for timm/<name> a file with timm's keys, or one with the same tensors in the same order under
    other names. The classifier and what lies behind the encoder's last map are left out.

    Raises:
        InputError: as `load_weights`.
    """
    name, state, _ = _read(source)
    encoder = model.settings.encoder
    state = {k: v for k, v in state.items() if not k.endswith(("num_batches_tracked", "relative_position_index"))}
    if encoder in IMAGENET_EXTRAS:
        kept = {k: v for k, v in state.items() if not re.search(IMAGENET_EXTRAS[encoder], k)}
        state = {rename_encoder_key(key, encoder): tensor for key, tensor in kept.items()}
    else:
        state = _timm_state(model.encoder, encoder.removeprefix("timm/"), state)
    return _load(model.encoder, state, name, partial, optional=IMAGENET_MISSING.get(encoder), kind="imagenet")


def save_weights(model: nn.Module, path: str | Path, *, kind: str = "raw", half: bool = False, **notes: str) -> None:
    """Write a model's weights as safetensors that carry its name and settings; written aside and renamed.

    Args:
        kind: "raw" or "ema", kept in the file.
        half: store float16, read back as float32. A filter that is the same at all its places (a frozen identity bank
            of `VOSNetwork.ease_start`) is then stored once.
        notes: more text to keep in the file.
    """
    from safetensors.torch import save_file

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        key: (tensor.half() if half and tensor.is_floating_point() else tensor).detach().cpu().contiguous()
        for key, tensor in model.state_dict().items()
        if not key.endswith("relative_position_index")
    }
    metadata = {"model": model.name, "settings": json.dumps(asdict(model.settings)), "kind": kind, **notes}
    repeated = {}
    for key, tensor in tensors.items():
        once = tensor[..., :1, :1] if half and tensor.dim() == 4 else tensor
        if once.numel() < tensor.numel() and torch.equal(once.expand_as(tensor), tensor):
            tensors[key], repeated[key] = once.contiguous(), tensor.shape[-2:]
    if repeated:
        metadata["repeated"] = json.dumps(repeated)
    metadata["crc32"] = _checksum(tensors)  # the format has none
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        save_file(tensors, temporary, metadata)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def load_model(checkpoint: str | Path | None, name: str | None = None, partial: bool = False) -> nn.Module:
    """Build a model and load its weights; own files know their model, so `name` may be left out with them.

    Raises:
        InputError: no name and none in the file, or a name that contradicts the file; else as `load_weights`.
    """
    if checkpoint is None:
        if name is None:
            raise InputError("neither a model nor a checkpoint is given: pass --model NAME or --checkpoint FILE")
        return build_model(name)
    _, state, metadata = _read(checkpoint)
    if "settings" in metadata:
        if name is not None and name.lower() != metadata.get("model"):
            raise InputError(
                f"{checkpoint} holds a {metadata.get('model')}, --model says {name}: leave --model out or make them "
                "agree"
            )
        try:
            settings = json.loads(metadata["settings"])
            model = build_model(metadata["model"], **settings)
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise InputError(f"{checkpoint}: what it says of its model cannot be used ({error})") from error
    elif name is None:
        raise InputError(f"{checkpoint} does not say which model it holds: pass --model NAME as well")
    else:
        model = build_model(name)
    load_weights(model, checkpoint, partial)
    return model


def describe_weights(checkpoint: str | Path) -> dict[str, str]:
    """File name, SHA-256 and kind ("raw", "ema" or "unknown") of a weights file, for results to refer to."""
    path = Path(checkpoint)
    metadata = _read(path)[2]
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"file": path.name, "sha256": digest, "kind": metadata.get("kind", "unknown")}


def _read(source: str | Path | Mapping[str, Tensor]) -> tuple[str, dict[str, Tensor], dict[str, str]]:
    """Name, flat state dict and metadata of a source."""
    metadata: dict[str, str] = {}
    if isinstance(source, Mapping):
        name, content = "the state dict", source
    else:
        path = Path(source)
        name = str(path)
        if not path.is_file():
            what = "is a folder" if path.is_dir() else "no such file"
            raise InputError(f"{name}: {what}; give a weights file (.safetensors or .pth)")
        try:
            with open(path, "rb") as file:
                start = file.read(9)
        except OSError as error:
            raise InputError(f"{name}: cannot be read ({error.strerror})") from None
        if start[8:] == b"{":  # the length of a header in 8 bytes, then the header
            content, metadata = _read_safetensors(path)
        elif start.startswith((b"PK", b"\x80")):  # a zip file or a pickle
            content = _read_torch(path)
        else:
            raise InputError(f"{name}: is {'no weights file' if start else 'empty'}; give a .safetensors or .pth file")
    for wrapper in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping):
        raise InputError(f"{name}: holds a {type(content).__name__}, not a state dict of tensors")
    tensors = {str(k).removeprefix("module."): v for k, v in content.items() if isinstance(v, Tensor)}
    if not tensors:
        raise InputError(f"{name}: holds no tensors; a state dict, bare or under 'state_dict' or 'model', is expected")
    return name, tensors, metadata


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    try:
        with safe_open(path, framework="pt") as file:
            tensors, metadata = {key: file.get_tensor(key) for key in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except Exception as error:  # types that this version of PyTorch lacks raise what they like
        raise InputError(f"{path}: is not a whole safetensors file ({error})") from None
    if metadata.get("crc32", found := _checksum(tensors)) != found:
        raise InputError(f"{path}: is damaged, its values do not match their checksum; copy or save it again")
    try:
        for key, (height, width) in json.loads(metadata.get("repeated", "{}")).items():
            if not 1 <= height * width <= MAX_KERNEL:
                raise ValueError(f"{key} repeated {height} x {width} times")
            tensors[key] = tensors[key].expand(-1, -1, height, width)
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError, RecursionError) as error:
        raise InputError(f"{path}: what it says of repeated values cannot be used ({error})") from None
    return tensors, metadata


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """CRC-32 of all values, in the order of their names."""
    checksum = 0
    for key in sorted(tensors):
        checksum = zlib.crc32(tensors[key].contiguous().reshape(-1).view(torch.uint8).numpy(), checksum)
    return str(checksum)


def _read_torch(path: Path) -> object:
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                # PyTorch stores without compression, so that no entry can be larger than the file, and reads on over
                # bytes that do not match their checksum.
                if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
                    raise InputError(f"{path}: unpacks to more than its size; PyTorch's own files are not compressed")
                if bad := archive.testzip():
                    raise ValueError(f"{bad} does not match its checksum")
        with open(path, "rb") as file:  # of a path, PyTorch would look at the name as well
            return torch.load(file, map_location="cpu", weights_only=True)
    except InputError:
        raise
    except pickle.UnpicklingError:
        raise InputError(
            f"{path}: holds pickled Python objects, which could run code and are never loaded; convert it where you "
            "trust it: torch.save(torch.load(FILE, weights_only=False).state_dict(), NEW_FILE), or ['state_dict'] "
            "in place of .state_dict() where FILE holds a dict"
        ) from None
    except Exception as error:  # damage surfaces anywhere in the unpickling
        reason = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]  # what follows is unsafe advice
        raise InputError(f"{path}: is not a whole PyTorch weights file ({reason})") from None


def _load(
    module: nn.Module, state: dict[str, Tensor], name: str, partial: bool, *, kind: str, optional: str | None = None
) -> LoadReport:
    own = {k: v for k, v in module.state_dict().items() if not k.endswith("relative_position_index")}
    fits = {k: v for k, v in state.items() if k in own and v.shape == own[k].shape}
    misshapen = [
        f"{k} {tuple(v.shape)} instead of {tuple(own[k].shape)}"
        for k, v in state.items()
        if k in own and v.shape != own[k].shape
    ]
    unexpected = [k for k in state if k not in own]
    missing = [k for k in own if k not in state and not (optional and re.search(optional, k))]
    if not partial and (missing or unexpected or misshapen):
        problems = [
            f"{len(keys)} {what}: {', '.join(keys[:10])}{', ...' if len(keys) > 10 else ''}"
            for what, keys in (("missing", missing), ("unexpected", unexpected), ("misshapen", misshapen))
            if keys
        ]
        raise InputError(f"{name} does not fit the model: {'; '.join(problems)}")
    module.load_state_dict({k: v.to(own[k].dtype) for k, v in fits.items()}, strict=False)
    share = sum(v.numel() for v in fits.values()) / sum(v.numel() for v in own.values())
    return LoadReport(name, len(fits), missing, unexpected, misshapen, share, kind)


def _timm_state(encoder: nn.Module, name: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """State of a whole timm classifier, or of a port of it with other names, as the encoder's own."""
    import timm

    wanted = {key for key in encoder.backbone.state_dict() if not key.endswith("num_batches_tracked")}
    with torch.device("meta"):
        whole = timm.create_model(name).state_dict()
    whole = {key: tensor for key, tensor in whole.items() if not key.endswith("num_batches_tracked")}
    if not (wanted | set(whole)) & set(state):
        shapes, given = [tuple(v.shape) for v in whole.values()], [tuple(v.shape) for v in state.values()]
        if shapes == given:
            state = dict(zip(whole, state.values(), strict=True))
    # A backbone cut to its maps has stages.0 as stages_0, or lies under `model`, by family.
    own = {
        key: next((form for form in (key, key.replace(".", "_", 1), "model." + key) if form in wanted), None)
        for key in whole
    }
    return {f"backbone.{own.get(key, key)}": v for key, v in state.items() if own.get(key, key) is not None}
