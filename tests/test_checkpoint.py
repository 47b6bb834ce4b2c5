"""Weights in and out: every layout that is right loads, every one that is wrong is refused in one line."""

import hashlib
import json
import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from golden_cases import golden_state
from torch import Tensor, nn

from models import build_model
from utils.checkpoint import describe_weights, load_encoder, load_model, load_weights, save_weights
from utils.errors import InputError


@pytest.fixture(scope="module")
def published() -> dict[str, Tensor]:
    return golden_state("aott")


@pytest.fixture(scope="module")
def model(published) -> nn.Module:
    """The one model that the tests load into: `restore` gives it back its weights."""
    model = build_model("aott")
    load_weights(model, published)
    return model


@pytest.fixture(scope="module")
def own(model) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


@pytest.fixture
def restore(model, own):
    yield
    model.load_state_dict(own)


def blank(model: nn.Module) -> None:
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()


def same(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def refused(call, *args, **kwargs) -> str:
    with pytest.raises(InputError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    planes = torch.zeros(1, 11, 33, 49)
    planes[:, 0], planes[:, 1, :20, :20], planes[:, 0, :20, :20] = 1, 1, 0
    features = model.encode(torch.linspace(-2, 2, 3 * 33 * 49).reshape(1, 3, 33, 49))
    tokens, _ = model.transformer(features.tokens, features.position, features.size, model.embed_identities(planes))
    return model.decode(tokens, features)


def add_prefix(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"module." + key: value for key, value in state.items()}


LAYOUTS = {
    "plain": lambda state: state,
    "module": add_prefix,
    "state_dict": lambda state: {"state_dict": state, "optimizer": {"step": 3}, "epoch": 7},
    "model": lambda state: {"model": state},
    "state_dict, module": lambda state: {"state_dict": add_prefix(state), "scaler": {}},
    "counters": lambda state: state | {"encoder.features.0.1.num_batches_tracked": torch.tensor(3)},
}


@pytest.mark.parametrize("kind", ["file", "old file", "dict"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_load_equal(model, own, published, restore, tmp_path, layout, kind):
    source = LAYOUTS[layout](published)
    if kind != "dict":
        torch.save(source, tmp_path / "weights.pth", _use_new_zipfile_serialization=kind == "file")
        source = tmp_path / "weights.pth"
    before = logits(model)
    blank(model)
    assert not logits(model).equal(before)
    report = load_weights(model, source)
    assert report.share == 1 and report.loaded == len(own)
    assert report.missing == report.unexpected == report.misshapen == []
    assert same(model, own)
    assert logits(model).equal(before) and before.std() > 0.1


def test_own_names_and_half_precision_load(model, own, restore):
    blank(model)
    load_weights(model, {"state_dict": {key: value.half() for key, value in own.items()}})
    for key, value in model.state_dict().items():
        assert value.dtype == torch.float32 and torch.equal(value, own[key].half().float())


def listed(message: str, what: str) -> tuple[int, list[str]]:
    """The count and the names that a message gives of missing, unexpected or misshapen tensors."""
    found = re.search(rf"(\d+) {what}: (.*?)(?:;|$)", message)
    assert found, message
    names = found[2].split(", ")
    if int(found[1]) > 10:
        assert names.pop() == "..."
    return int(found[1]), names


def test_half_the_keys_renamed(model, own, published, restore):
    odd = list(published)[1::2]
    state = {key + "_x" if key in odd else key: value for key, value in published.items()}
    assert len(odd) > 100
    message = refused(load_weights, model, state)
    for what, names in (("missing", own), ("unexpected", None)):
        count, some = listed(message, what)
        assert count == len(odd) and len(some) == 10
        assert all(name in names if names else name.endswith("_x") for name in some)
    assert "misshapen" not in message
    assert same(model, own), "a refused file must leave the model as it was"


def test_few_missing_are_all_named(model, own, published, restore):
    gone = ["decoder.conv_out.bias", "LSTT.layers.0.norm1.weight"]
    message = refused(load_weights, model, {key: value for key, value in published.items() if key not in gone})
    assert listed(message, "missing") == (2, ["transformer.layers.0.norm1.weight", "decoder.conv_out.bias"])
    assert same(model, own)


def test_wrong_shape(model, own, published, restore):
    state = published | {"decoder.conv_out.weight": torch.zeros(5, 128, 1, 1)}
    message = refused(load_weights, model, state)
    assert "1 misshapen: decoder.conv_out.weight (5, 128, 1, 1) instead of (11, 128, 1, 1)" in message
    assert "missing" not in message and "unexpected" not in message
    assert same(model, own)


def test_weights_of_another_model(model, restore):
    message = refused(load_weights, model, build_model("aots", encoder="timm/test_resnet").state_dict())
    assert listed(message, "missing")[0] > 100 and "unexpected" in message


def test_partial_loading_reports_the_share(model, own, published, restore):
    state = dict(published) | {"decoder.conv_out.weight": torch.zeros(5, 128, 1, 1), "new.weight": torch.zeros(3)}
    del state["LSTT.layers.0.linear1.weight"]
    blank(model)
    report = load_weights(model, state, partial=True)
    lost = ["transformer.layers.0.linear1.weight", "decoder.conv_out.weight"]
    assert report.missing == lost[:1] and report.unexpected == ["new.weight"]
    assert report.misshapen == ["decoder.conv_out.weight (5, 128, 1, 1) instead of (11, 128, 1, 1)"]
    assert report.loaded == len(own) - 2
    total = sum(value.numel() for value in own.values())
    assert report.share == pytest.approx(1 - sum(own[key].numel() for key in lost) / total, abs=1e-9)
    for key, value in model.state_dict().items():
        assert torch.equal(value, torch.zeros_like(value) if key in lost else own[key]), key


class Payload:
    """An object whose unpickling writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def whole_module(path: Path, _: Path) -> None:
    torch.save(nn.Linear(2, 2), path)


def object_among_tensors(path: Path, trace: Path) -> None:
    torch.save({"state_dict": {"weight": torch.zeros(2)}, "args": Payload(trace)}, path)


def old_format(path: Path, trace: Path) -> None:
    torch.save({"args": Payload(trace)}, path, _use_new_zipfile_serialization=False)


def plain_pickle(path: Path, trace: Path) -> None:
    path.write_bytes(pickle.dumps(Payload(trace), protocol=2))


@pytest.mark.parametrize("write", [whole_module, object_among_tensors, old_format, plain_pickle])
@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_pickled_objects_are_refused_and_never_run(model, tmp_path, write, suffix):
    path, trace = tmp_path / f"weights{suffix}", tmp_path / "was_run"
    write(path, trace)
    for call in (lambda: load_weights(model, path), lambda: load_model(path), lambda: describe_weights(path)):
        message = refused(call)
        assert str(path) in message
        assert "pickled Python objects" in message and "could run code" in message  # why
        assert "torch.save(torch.load(FILE, weights_only=False).state_dict(), NEW_FILE)" in message  # and what to do
    assert not trace.exists()
    if write is plain_pickle:
        pickle.loads(path.read_bytes())
        assert trace.exists()  # the payload would have worked


def test_conversion_that_the_message_names_works(tmp_path):
    network = build_model("aott", encoder="timm/test_resnet")
    old, new = tmp_path / "old.pth", tmp_path / "new.pth"
    torch.save(network, old)
    message = refused(load_weights, network, old)
    command = re.search(r"torch\.save\(.*?NEW_FILE\)", message)[0]
    exec(command, {"torch": torch, "FILE": old, "NEW_FILE": new})
    assert load_weights(network, new).share == 1


def broken_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Files that are none, and what the message must say."""
    network = nn.Linear(300, 300)
    torch.save(network.state_dict(), folder / "whole.pth")
    torch.save(network.state_dict(), folder / "old.pth", _use_new_zipfile_serialization=False)
    from safetensors.torch import save_file

    save_file(network.state_dict(), folder / "whole.safetensors")

    def written(name: str, content: bytes) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    def cut(name: str, share: float) -> bytes:
        content = (folder / name).read_bytes()
        return content[: int(len(content) * share)]

    (folder / "folder.pth").mkdir()
    torch.save([torch.zeros(2)], folder / "list.pth")
    torch.save({"epoch": 3}, folder / "none.pth")
    return {
        "half a pth": (written("half.pth", cut("whole.pth", 0.5)), "not a whole PyTorch weights file"),
        "most of a pth": (written("most.pth", cut("whole.pth", 0.999)), "not a whole PyTorch weights file"),
        "half an old pth": (written("half_old.pth", cut("old.pth", 0.5)), "not a whole PyTorch weights file"),
        "half a safetensors": (written("half.safetensors", cut("whole.safetensors", 0.5)), "not a whole safetensors"),
        "most of one": (written("most.safetensors", cut("whole.safetensors", 0.999)), "not a whole safetensors"),
        "its header": (written("header.safetensors", cut("whole.safetensors", 0.0001)), "not a whole safetensors"),
        "folder": (folder / "folder.pth", "is a folder"),
        "nothing": (folder / "nowhere.pth", "no such file"),
        "empty pth": (written("empty.pth", b""), "is empty"),
        "empty safetensors": (written("empty.safetensors", b""), "is empty"),
        "text": (written("text.pth", b"404: Not Found\nno weights here\n"), "no weights file"),
        "pointer": (written("lfs.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "no weights file"),
        "picture": (written("picture.pth", b"\x89PNG\r\n\x1a\n" + bytes(100)), "no weights file"),
        "list": (folder / "list.pth", "holds a list, not a state dict"),
        "no tensors": (folder / "none.pth", "holds no tensors"),
    }


def test_broken_files_are_refused_in_one_line(model, own, restore, tmp_path):
    for name, (path, reason) in broken_files(tmp_path).items():
        message = refused(load_weights, model, path)
        assert str(path) in message and reason in message, f"{name}: {message}"
        assert "weights_only=False" not in message, f"{name}: unsafe advice for a file that is only broken"
        assert reason in refused(load_model, path, "aott")
    assert same(model, own)


def test_the_content_decides_not_the_name(model, own, restore, tmp_path):
    save_weights(model, tmp_path / "weights.pth")
    torch.save(own, tmp_path / "weights.safetensors")
    for name in ("weights.pth", "weights.safetensors"):
        blank(model)
        load_weights(model, tmp_path / name)
        assert same(model, own)


# Own files.


@pytest.fixture(scope="module")
def small() -> nn.Module:
    """A model with settings of its own."""
    return build_model("deaots", encoder="timm/test_convnext", layers=1, memory_gap_test=3)


@pytest.mark.parametrize("half", [False, True])
def test_round_trip(small, tmp_path, half):
    path = tmp_path / "new" / "folder" / "small.safetensors"
    save_weights(small, path, kind="ema", half=half, recipe="none")
    again = load_model(path)
    assert again.name == "deaots" and again.settings == small.settings
    assert again.align_corners is False and again.test_memory_gap == 3
    for key, value in small.state_dict().items():
        expected = value.half().float() if half else value
        assert again.state_dict()[key].dtype == value.dtype
        assert torch.equal(again.state_dict()[key], expected), key
    assert load_weights(again, path).kind == "ema"
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert metadata["model"] == "deaots" and metadata["kind"] == "ema" and metadata["recipe"] == "none"
    assert json.loads(metadata["settings"])["encoder"] == "timm/test_convnext"
    assert os.listdir(path.parent) == ["small.safetensors"]
    assert path.stat().st_mode & 0o777 == 0o644
    values = sum(value.numel() for value in small.state_dict().values())
    assert path.stat().st_size == pytest.approx(values * (2 if half else 4), rel=0.05)


def test_filters_that_are_the_same_everywhere_are_stored_once(tmp_path):
    whole, eased = build_model("aott"), build_model("aott")
    eased.ease_start()
    sizes = []
    for name, model in (("whole", whole), ("eased", eased)):
        path = tmp_path / f"{name}.safetensors"
        save_weights(model, path, half=True)
        sizes.append(path.stat().st_size)
        loaded = load_model(path)
        for key, tensor in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], tensor.half().to(tensor.dtype))
        loaded.identity_bank.weight.data[0, 0, 0, 0] = 5  # has memory of its own for every place
        assert (loaded.identity_bank.weight == 5).sum() == 1
    assert sizes[0] - sizes[1] > 0.95 * 2 * whole.identity_bank.weight.numel()


@pytest.mark.parametrize("note", ['{"identity_bank.weight": [100000, 100000]}', '{"nothing": [2, 2]}', "[1]", "[["])
def test_notes_of_repeated_values_are_checked(small, tmp_path, note):
    path = tmp_path / "weights.safetensors"
    save_weights(small, path, repeated=note)
    with pytest.raises(InputError, match="repeated values cannot be used"):
        load_model(path)


def test_load_model_names(small, published, tmp_path):
    path = tmp_path / "small.safetensors"
    save_weights(small, path)
    assert load_model(path, "DeAOTs").settings == small.settings
    message = refused(load_model, path, "aott")
    assert "deaots" in message and "aott" in message and "--model" in message
    torch.save(published, tmp_path / "published.pth")
    assert "pass --model" in refused(load_model, tmp_path / "published.pth")
    assert load_model(tmp_path / "published.pth", "aott").name == "aott"
    assert "did you mean aott?" in refused(load_model, tmp_path / "published.pth", "aotx")
    assert "--model NAME or --checkpoint FILE" in refused(load_model, None)


def test_file_of_a_newer_version(small, tmp_path):
    """A setting that this version does not know is no traceback."""
    from safetensors.torch import save_file

    settings = json.dumps({"family": "aot", "rotary": True})
    state = {key: value.contiguous() for key, value in small.state_dict().items()}
    save_file(state, tmp_path / "new.safetensors", {"model": "aott", "settings": settings})
    assert "'rotary' is not known" in refused(load_model, tmp_path / "new.safetensors")


def test_describe_weights(small, published, tmp_path):
    save_weights(small, tmp_path / "a.safetensors", kind="ema")
    torch.save(published, tmp_path / "b.pth")
    for name, kind in (("a.safetensors", "ema"), ("b.pth", "unknown")):
        digest = hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        assert describe_weights(tmp_path / name) == {"file": name, "sha256": digest, "kind": kind}


def test_a_failed_write_leaves_what_was_there(small, tmp_path):
    path = tmp_path / "small.safetensors"
    save_weights(small, path)
    before = path.read_bytes()
    with pytest.raises(TypeError):
        save_weights(small, path, steps=100)  # safetensors keeps text alone: fails while it writes
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]
    with pytest.raises(TypeError):
        save_weights(small, tmp_path / "other.safetensors", steps=100)
    assert os.listdir(tmp_path) == [path.name]


def test_writing_goes_aside_and_is_renamed(small, tmp_path, monkeypatch):
    """Killed at the moment of the rename, the old file is whole and no file of the new name looks complete."""
    path = tmp_path / "small.safetensors"
    save_weights(small, path, kind="ema")
    before = path.read_bytes()
    seen = {}

    def killed(temporary: str, target: Path) -> None:
        seen["whole"] = Path(temporary).stat().st_size
        seen["beside"] = Path(temporary).parent == path.parent and not Path(temporary).name.endswith(".safetensors")
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        save_weights(small, path, kind="raw")
    assert seen["whole"] == len(before) and seen["beside"]
    assert path.read_bytes() == before and os.listdir(tmp_path) == [path.name]


# ImageNet files of encoders.


def random_state(module: nn.Module) -> dict[str, Tensor]:
    """Its state dict with batch norms that do something."""
    generator = torch.Generator().manual_seed(0)
    state = module.state_dict()
    for key, value in state.items():
        if key.endswith("running_mean"):
            value.normal_(0, 0.1, generator=generator)
        elif key.endswith("running_var"):
            value.uniform_(0.7, 1.3, generator=generator)
        elif key.endswith("num_batches_tracked"):
            value.fill_(1000)
    return state


def close(maps: list[Tensor], expected: list[Tensor]) -> None:
    for own_map, right in zip(maps, expected, strict=True):
        torch.testing.assert_close(own_map, right, rtol=1e-4, atol=1e-4 * right.abs().max().item())


IMAGES = torch.randn(1, 3, 49, 65, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def test_imagenet_mobilenetv2(model, restore):
    from torchvision.models import mobilenet_v2

    classifier = mobilenet_v2().eval()
    report = load_encoder(model, random_state(classifier))  # counters and classifier are left out without a word
    assert report.share == 1 and report.unexpected == [] and report.kind == "imagenet"
    x, maps = IMAGES, []
    for i, block in enumerate(classifier.features[:14]):
        x = block(x)
        if i in (3, 6, 13):
            maps.append(x)
    close(model.encoder(IMAGES)[:3], maps)
    # The last stage runs dilated: at stride 1 by hand it is torchvision's.
    for i, block in enumerate(classifier.features[14:18], start=14):
        depthwise = block.conv[1][0]
        depthwise.stride = (1, 1)
        if i > 14:
            depthwise.dilation = depthwise.padding = (2, 2)
    close(model.encoder(IMAGES)[3:], [classifier.features[14:](x)])


@torch.inference_mode()
def test_imagenet_resnet50():
    from torchvision.models import resnet50

    classifier = resnet50().eval()
    model = build_model("r50_aotl", layers=1)
    assert load_encoder(model, {"model": add_prefix(random_state(classifier))}).share == 1
    x = classifier.maxpool(classifier.relu(classifier.bn1(classifier.conv1(IMAGES))))
    maps = []
    for stage in (classifier.layer1, classifier.layer2, classifier.layer3):
        x = stage(x)
        maps.append(x)
    close(model.encoder(IMAGES), [*maps, maps[-1]])


def test_imagenet_resnest101(monkeypatch):
    """The official file has timm's names: stem conv1.0 to conv1.6, radix blocks, layer4 and fc left out."""
    import timm

    monkeypatch.setattr(nn.init, "kaiming_normal_", lambda x, *_, **__: x)  # spares the time of a random start
    classifier = timm.create_model("resnest101e")
    model = build_model("rs101_aotl", layers=1)
    state = random_state(classifier)
    assert {"conv1.0.weight", "conv1.6.weight", "layer4.0.conv1.weight", "fc.weight"} <= set(state)
    assert load_encoder(model, state).share == 1
    assert model.encoder.state_dict()["backbone.layer3.22.bn3.running_var"].equal(state["layer3.22.bn3.running_var"])


@torch.inference_mode()
def test_imagenet_swin(monkeypatch, tmp_path):
    """The official names and order, as its code has them, made from torchvision's model."""
    from torchvision.models import swin_b

    monkeypatch.setattr(nn.init, "trunc_normal_", lambda x, mean=0.0, std=1.0, **__: x.data.normal_(mean, std))
    classifier = swin_b().eval()
    official = {}
    for key, value in classifier.state_dict().items():
        key = key.replace("features.0.0.", "patch_embed.proj.").replace("features.0.2.", "patch_embed.norm.")
        key = re.sub(r"features\.(\d)\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.blocks.{m[2]}.", key)
        key = re.sub(r"features\.(\d)\.", lambda m: f"layers.{int(m[1]) // 2 - 1}.downsample.", key)
        key = key.replace("mlp.0.", "mlp.fc1.").replace("mlp.3.", "mlp.fc2.")
        if key.endswith("relative_position_index"):
            value = value.reshape(49, 49)
        official[key] = value
    official["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    assert {
        "norm.weight",
        "head.weight",
        "layers.2.downsample.reduction.weight",
        "layers.3.blocks.1.mlp.fc2.bias",
    } <= set(official)
    model = build_model("swinb_aotl", layers=1)
    report = load_encoder(model, {"model": official})
    norms = sum(value.numel() for key, value in model.encoder.state_dict().items() if key.startswith("norms."))
    assert report.missing == [] and report.unexpected == []
    assert report.share == pytest.approx(
        1 - norms / sum(v.numel() for k, v in model.encoder.state_dict().items() if not k.endswith("_index")), abs=1e-6
    )
    images = IMAGES[..., :48, :64]
    maps, x = [], images
    for i, stage in enumerate(classifier.features[:6]):
        x = stage(x)
        if i % 2:
            maps.append(nn.functional.layer_norm(x, x.shape[-1:]).permute(0, 3, 1, 2))
    close(model.encoder(images), [*maps, maps[-1]])
    # Its index tables are computed: not saved, not missed.
    save_weights(model, tmp_path / "swin.safetensors", half=True)
    assert load_weights(model, tmp_path / "swin.safetensors").share == 1


@pytest.mark.parametrize("name", ["test_convnext", "test_resnet", "twins_svt_small", "densenet121"])
@torch.inference_mode()
def test_imagenet_timm(name, tmp_path):
    """timm's own files: of some families the cut backbone has other names than the classifier."""
    import timm
    from safetensors.torch import save_file

    classifier = timm.create_model(name).eval()
    save_file(random_state(classifier), tmp_path / "model.safetensors")
    model = build_model("aott", encoder=f"timm/{name}")
    assert load_encoder(model, tmp_path / "model.safetensors").share == 1
    images = IMAGES[..., : 48 + model.align_corners, : 64 + model.align_corners]
    right = {
        tuple(level.shape[1:]): level for level in classifier.forward_intermediates(images, intermediates_only=True)
    }
    for level in model.encoder(images)[:3]:
        if name == "densenet121" and tuple(level.shape[1:]) not in right:
            continue
        close([level], [right[tuple(level.shape[1:])]])


def test_imagenet_of_another_encoder(model, own, restore):
    from torchvision.models import resnet18

    message = refused(load_encoder, model, resnet18().state_dict())
    assert listed(message, "missing")[0] > 100 and listed(message, "unexpected")[0] > 50
    assert same(model, own)
