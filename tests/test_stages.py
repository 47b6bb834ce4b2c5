"""The stages' YAML files give the published recipe, for every model."""

import json
from pathlib import Path

import pytest
from golden_cases import golden_path

import train
from data.training import describe
from models.registry import list_models, model_settings
from utils.cli import read_options

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
STAGES = ["pre", "pre_dav", "pre_ytb", "pre_ytb_dav", "ytb"]
NAMES = {  # in the reference's table, and here
    "TRAIN_TOTAL_STEPS": "total_steps",
    "TRAIN_BATCH_SIZE": "batch_size",
    "TRAIN_WEIGHT_DECAY": "weight_decay",
    "TRAIN_LR": "lr",
    "TRAIN_LR_ENCODER_RATIO": "lr_encoder_ratio",
    "TRAIN_LR_WARM_UP_RATIO": "warm_up_ratio",
    "TRAIN_AUX_LOSS_RATIO": "reference_loss_ratio",
    "TRAIN_SEQ_TRAINING_START_RATIO": "feed_predictions_ratio",
    "TRAIN_EMA_RATIO": "ema_ratio",
    "TRAIN_CLIP_GRAD_NORM": "clip_norm",
    "TRAIN_SAVE_STEP": "save_every",
    "TRAIN_MAX_KEEP_CKPT": "keep",
    "TRAIN_LOG_STEP": "log_every",
    "DATA_SEQ_LEN": "frames",
    "DATA_SHORT_EDGE_LEN": "short_edge",
    "DATA_DYNAMIC_MERGE_PROB": "merge",
}


def published(stage: str, model: str) -> dict:
    """The reference's settings: its defaults, what the stage and the model change, and the combinations it lists."""
    config = json.loads(golden_path("optim.json").read_text())["config"]
    found = {}
    for row in config["table"]:
        found[row["key"]] = row["default"]
        for part, name in (("by_model", model), ("by_stage", stage)):
            found[row["key"]] = row.get(part, {}).get(name, found[row["key"]])
    return found | config["by_stage_and_model_final"].get(f"{model}/{stage}", {})


def options(stage: str, model: str) -> dict:
    file = CONFIGS / "stages" / f"{stage}.yaml"
    given = read_options(train.main, file, {"model": model, "data_root": ".", "output_dir": "."})
    train.fill_in(given, model_settings(model))
    return given


def test_all_stages_are_there():
    assert sorted(path.stem for path in (CONFIGS / "stages").glob("*.yaml")) == STAGES


@pytest.mark.parametrize("model", list_models())
@pytest.mark.parametrize("stage", STAGES)
def test_values_are_the_published_ones(stage, model):
    expected, given = published(stage, model), options(stage, model)
    assert {name: given[name] for name in NAMES.values()} == {NAMES[key]: expected[key] for key in NAMES}
    assert given["scale"] == (expected["DATA_MIN_SCALE_FACTOR"], expected["DATA_MAX_SCALE_FACTOR"])
    assert list(given["crop"]) == expected["DATA_RANDOMCROP"]
    assert given["strong_augmentation"] == (expected["TRAIN_AUG_TYPE"] == "v2")
    assert given["lr_min"] == expected["TRAIN_LR_MIN"]
    assert [{"youtubevos2019": "youtubevos"}.get(name, name) for name in given["datasets"]] == expected["DATASETS"]
    gaps = {"davis2017": "DATA_RANDOM_GAP_DAVIS", "youtubevos2019": "DATA_RANDOM_GAP_YTB"}
    for name in given["datasets"]:
        assert describe(name).get("max_gap") == expected.get(gaps.get(name))
        assert describe(name).get("repeats", 1) == (expected["DATA_DAVIS_REPEAT"] if name == "davis2017" else 1)
    settings = model_settings(model)
    assert (settings.memory_gap_train or 9999) == expected["TRAIN_LONG_TERM_MEM_GAP"]
    assert (settings.memory_gap_test or 9999) == expected["TEST_LONG_TERM_MEM_GAP"]


def test_own_data():
    given = read_options(train.main, CONFIGS / "my_dataset.yaml", {"data_root": ".", "output_dir": "."})
    assert [describe(entry) for entry in given["datasets"]] == [{"kind": "video", "root": ".", "max_gap": 12}]
