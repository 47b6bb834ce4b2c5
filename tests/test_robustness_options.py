"""Command lines and YAML: whatever is in them, a run begins or one line says what is wrong; none runs code."""

import os
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from robustness import attempt, command, count, damaged
from training_cases import OPTIONS, command_line

import demo
import eval as evaluation
import train
from data.training import open_training_data
from utils.cli import read_options
from utils.continual.plugin import make_plugins
from utils.errors import InputError
from utils.options import TRAINING

SCRIPTS = {"train": train.main, "eval": evaluation.main, "demo": demo.main}
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["cuda:1", "auto", "0,1", "!!python/name:os.system", "null", "~", "{", "*a", "../x", "1e9", "\0"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def sizes(short: int, long: int) -> pytest.MarkDecorator:
    """A campaign of few cases always, and of many among the slow tests."""
    return pytest.mark.parametrize("cases", [short, pytest.param(long, marks=pytest.mark.slow)])


def options_of(script: str) -> list[str]:
    code = SCRIPTS[script].__code__
    return list(code.co_varnames[: code.co_argcount])


@sizes(20, 400)
@pytest.mark.parametrize("script", SCRIPTS)
def test_any_values(script: str, cases: int) -> None:
    """Values of any kind for any option, on the line and as Python values."""

    @settings(max_examples=cases)
    @given(st.dictionaries(st.sampled_from([*options_of(script), "no_such", "config"]), VALUES, max_size=3))
    def try_values(given_values: dict) -> None:
        given_values.pop("config", None)
        attempt(f"option values, {script}", given_values, lambda: read_options(SCRIPTS[script], None, given_values))

    try_values()


@sizes(20, 400)
def test_any_yaml(tmp_path: Path, cases: int) -> None:
    path = tmp_path / "options.yaml"

    @settings(max_examples=cases, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.dictionaries(st.sampled_from(options_of("train")), VALUES, max_size=4) | VALUES)
    def try_file(content: object) -> None:
        path.write_text(yaml.safe_dump(content))
        attempt("YAML, values", path.read_bytes(), lambda: read_options(train.main, path, {}))

    try_file()


@sizes(20, 400)
def test_damaged_yaml(tmp_path: Path, cases: int) -> None:
    rng = np.random.default_rng(0)
    whole = (Path(train.__file__).parent / "configs/stages/pre_ytb_dav.yaml").read_bytes()
    path = tmp_path / "options.yaml"
    for _ in range(cases):
        data = damaged(whole, rng)
        path.write_bytes(data)
        attempt("YAML, damaged", data, lambda: read_options(train.main, path, {"output_dir": "out", "data_root": "."}))


HOSTILE = {
    "call": "datasets: !!python/object/apply:os.system ['touch executed']",
    "object": "datasets: [!!python/object/new:subprocess.Popen [['touch', 'executed']]]",
    "name": "model: !!python/name:os.system",
    "module": "model: !!python/module:antigravity",
    "class path": "datasets: [{class_path: subprocess.Popen, init_args: {args: [touch, executed]}}]",
    "bomb": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
    + "datasets: *i\n",
    "bomb of options": "datasets: &a [{k: 1}]\n" + "experiments: *a\n" * 3,
    "ring": "datasets: &a [*a]",
    "ring of mappings": "datasets: &a [{name: *a}]",
    "deep": "datasets: " + "[" * 2000 + "]" * 2000,
    "merge": "<<: [1, 2]\nmodel: aott",
    "two documents": "model: aott\n---\nmodel: deaott",
    "tab": "model:\taott\n\tbatch_size: 3",
    "bytes": "model: !!binary aGVsbG8=",
    "date": "model: 2020-01-01",
    "null key": "? \n: 3",
    "list key": "? [a, b]\n: 3",
    "octal": "batch_size: 0o17",
    "huge number": "batch_size: " + "9" * 5000,
    "include": "model: !include /etc/passwd",
    "environment": "model: ${HOME}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_yaml(tmp_path: Path, monkeypatch, capfd, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "options.yaml").write_text(HOSTILE[name])
    words = ["--data_root", tmp_path / "none", "--output_dir", tmp_path / "out", "--config", tmp_path / "options.yaml"]
    status, _ = command("YAML, hostile", train.main, [*words, "--accelerator", "cpu"], capfd)
    assert status == 2 and sorted(os.listdir(tmp_path)) == ["options.yaml"]


def test_a_configuration_runs_no_module_that_nobody_named(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "harmful_plugin.py").write_text("open('imported', 'w')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delenv("VOS_PLUGINS", raising=False)
    for kind in ("harmful_plugin:Harm", "os:system", "subprocess:Popen", ":", "a:b:c", 3, None, ["os:system"]):
        assert attempt("plugins of a configuration", kind, lambda kind=kind: make_plugins([{"kind": kind}])) is None
    assert not Path("imported").exists()
    monkeypatch.setenv("VOS_PLUGINS", "other,harmful_plugin")
    with pytest.raises(InputError, match="cannot be imported"):
        make_plugins([{"kind": "harmful_plugin:Harm"}])
    assert Path("imported").exists()


DESCRIPTION = ["name", "kind", "root", "images", "annotations", "sequences", "max_gap", "merge", "sources", "repeats"]
DESCRIPTION += ["weight", "length", "min_reference", "motion", "max_objects", "nmae"]


@sizes(40, 400)
def test_any_description_of_data(tmp_path: Path, cases: int) -> None:
    values = VALUES | st.sampled_from(["still", "synthetic", "davis2017"])

    @settings(max_examples=cases)
    @given(st.lists(st.dictionaries(st.sampled_from(DESCRIPTION), values, max_size=3) | st.text(), max_size=3))
    def try_description(entries: list) -> None:
        assert attempt("description of data", entries, lambda: open_training_data(entries, tmp_path)) is None

    try_description()


SLIPS = [(name, value) for name in TRAINING for value in (-1, float("nan"), float("inf"), 10**12)]
SLIPS = [(name, [value, value] if name in ("crop", "scale") else value) for name, value in SLIPS]


def test_numbers_out_of_range(tmp_path: Path) -> None:
    """Every numeric option of the training, with values that would divide by zero, allocate or never end."""
    folders = {"data_root": str(tmp_path), "output_dir": str(tmp_path / "out")}
    usable = read_options(train.main, None, folders | {"datasets": ["davis2017"]})
    for name, value in SLIPS:
        options = usable | {name: value}
        with pytest.raises(InputError, match=f"--{name} .*: must lie between"):
            train.main(**options)
        count("numbers out of range", (name, value), "refused")
    with pytest.raises(InputError, match="smaller factor comes first"):
        train.main(**usable | { "scale": (2.0, 1.0)})
    assert os.listdir(tmp_path) == []


LONG = "x" * 5000
WORDS = {
    "eval": [
        ("scales", "nan"), ("scales", "inf"), ("scales", "1e9"), ("scales", "0"), ("scales", ""), ("scales", "-1"),
        ("threads", "0"), ("threads", "-3"), ("threads", "99999999"), ("max_long_edge", "1"),
        ("max_memory_frames", "0"), ("long_term_gap", "-1"), ("dataset", "davis"), ("split", "../../x"),
        ("split", "a\x00b"), ("resolution", "4k"), ("preset", "none"), ("devices", "-1"), ("devices", "0"),
        ("num_nodes", "0"), ("precision", "8"), ("strategy", "x"), ("accelerator", "tpu"), ("score", "maybe"),
        ("data_root", LONG), ("output_dir", LONG), ("checkpoint", LONG), ("checkpoint", "."),
        ("checkpoint", "/dev/zero"), ("checkpoint", "/dev/null"), ("data_root", "/dev/null"),
        ("output_dir", "/dev/null/x"), ("predictions", "/dev/null"), ("flip", "2"),
    ],
    "demo": [
        ("input", "/dev/zero"), ("input", "/dev/null"), ("input", LONG), ("mask", "/dev/zero"), ("mask", LONG),
        ("fps", "nan"), ("fps", "-1"), ("fps", "inf"), ("fps", "1e9"), ("fps", "0"), ("max_long_edge", "-5"),
        ("output_dir", "/dev/null"), ("output_dir", "/proc/x"), ("output_dir", LONG), ("devices", "2"),
        ("checkpoint", "/dev/zero"), ("checkpoint", "/proc/self/mem"), ("input", "http://localhost/x.mp4"),
        ("input", "concat:a|b"), ("input", "/proc/self/mem"), ("mask", "/proc/self/mem"), ("debug", "x"),
    ],
    "train": [
        ("resume", "nowhere"), ("resume", "/dev/zero"), ("init", "/dev/zero"), ("encoder_weights", "/dev/null"),
        ("encoder", "timm/none"), ("encoder", "timm/hf_hub:some/where"), ("encoder", "timm/../x"),
        ("model", "x"), ("freeze", "[nothing]"), ("crop", "[0, 0]"), ("crop", "[33]"),
        ("scale", "[1, 0.5]"), ("seed", "-1"), ("workers", "-1"), ("workers", "1000000"), ("log_every", "0"),
        ("save_every", "0"), ("val_every", "0"), ("batch_size", "0"), ("accumulation", "0"), ("accumulation", "3"),
        ("frames", "1"), ("datasets", "[]"), ("datasets", "[{kind: 3}]"), ("datasets", "[{name: ../../etc/passwd}]"),
        ("datasets", "[{root: 5}]"), ("output_dir", "/dev/null"), ("output_dir", LONG), ("data_root", LONG),
        ("data_root", "/dev/null"), ("logger", "tensorboard"), ("ema_ratio", "nan"), ("lr", "nan"),
        ("datasets", "[{sequences: [a, ../b]}]"), ("datasets", "[{weight: -1}]"), ("datasets", "[{repeats: 0}]"),
    ],
}


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("script", WORDS)
def test_unusable_words(tmp_path: Path, monkeypatch, capfd, script: str, every: int) -> None:
    """Options that parse and cannot be: each with the rest of a command that would run."""
    from test_robustness_data import write_data

    from data.masks import write_mask
    from models import build_model
    from utils.checkpoint import save_weights

    monkeypatch.chdir(tmp_path)
    root = write_data(tmp_path / "data", "folder")
    weights = tmp_path / "w.safetensors"
    save_weights(build_model("aott", encoder=OPTIONS["encoder"]), weights)
    write_mask("first.png", np.ones((32, 48), np.uint8))
    results = ["--checkpoint", weights, "--output_dir", "out"]
    whole = {
        "eval": ["--data_root", root, "--dataset", "folder", *results],
        "demo": ["--input", root / "JPEGImages/cat", "--mask", "first.png", *results],
        "train": command_line(root, Path("out"), total_steps=1),
    }[script]
    for name, value in WORDS[script][::every]:
        words = [*whole, "--accelerator", "cpu", f"--{name}={value}"]
        status, _ = command(f"unusable options, {script}", SCRIPTS[script], words, capfd)
        assert status == 2, (name, value)
        assert not Path("out/scores.json").exists() and not Path("out/summary.json").exists()
