import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from utils.cli import _configs_first, run
from utils.errors import InputError

CALLS = []


@dataclass
class Optimiser:
    """How weights change.

    Args:
        lr: step size.
        steps: number of steps.
    """

    lr: float = 1e-3
    steps: int = 3


def script(
    model: str,
    devices: int | str | list[int] = "auto",
    precision: Literal["auto", "32-true"] = "auto",
    optimiser: Optimiser = Optimiser(),  # noqa: B008
    extra: dict | None = None,
    anything: Any = None,
    fail: str | None = None,
    debug: bool = False,
) -> int:
    """Do as the options say.

    Args:
        model: name of the model.
        devices: what computes.
        optimiser: settings of the optimiser.
    """
    CALLS.append((model, devices, optimiser, extra, anything))
    if fail == "input":
        raise InputError("--mask first.png: is empty\nshould hold an object")
    if fail == "interrupt":
        raise KeyboardInterrupt
    if fail:
        raise OSError("disk\n\nfull")
    return 7


def call(*argv: str) -> tuple:
    CALLS.clear()
    run(script, argv)
    (options,) = CALLS
    return options


def failure(capsys: pytest.CaptureFixture, status: int, *argv: str) -> str:
    """What stands on stderr after a run that must end with `status` and one line."""
    with pytest.raises(SystemExit) as stopped:
        run(script, argv)
    out, err = capsys.readouterr()
    assert stopped.value.code == status
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str, name: str = "a.yaml") -> str:
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def test_flags_win_over_files_wherever_they_stand(config):
    first = config("model: a\ndevices: [0, 1]\noptimiser: {lr: 1e-4, steps: 5}\n")
    second = config("model: b\noptimiser:\n  steps: 6\n", "b.yaml")
    assert call("--optimiser.steps", "9", "--config", first) == ("a", [0, 1], Optimiser(1e-4, 9), None, None)
    assert call(f"--config={first}", "--config", second, "--devices=2,3")[:3] == ("b", "2,3", Optimiser(1e-4, 6))
    assert call("--config", second, "--model", "c", "--config", first)[:3] == ("c", [0, 1], Optimiser(1e-4, 5))


@given(st.lists(st.sampled_from(["--config", "--config=x", "--a", "b", "--c=d"])))
def test_moving_configs_loses_and_invents_nothing(argv):
    moved = _configs_first(argv)
    assert sorted(moved) == sorted(argv)
    assert _configs_first(moved) == moved


@pytest.mark.parametrize(
    ("text", "value"), [("1", 1), ("2,3", "2,3"), ("[0,1]", [0, 1]), ("cuda:1", "cuda:1"), ("auto", "auto")]
)
def test_forms_of_devices_reach_the_function(text, value):
    assert call("--model", "m", "--devices", text)[1] == value


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--modle", "x"], ["--modle", "--model"]),
        (["--model", "m", "--dev", "3"], ["--dev;", "--devices"]),  # an abbreviation is a typo too
        (["--model", "m", "--optimiser.stesp=4"], ["--optimiser.stesp;", "--optimiser.steps"]),
        (["--model", "m", "stray"], ["stray", "--name value"]),
        (["--model", "m", "--optimiser.lr", "abc"], ["--optimiser.lr", "float", "abc"]),
        (["--model", "m", "--precision", "8-mixed"], ["--precision", "32-true", "8-mixed"]),
        (["--model", "m", "--debug", "maybe"], ["--debug", "maybe"]),
        (["--model"], ["--model"]),
        ([], ["required", "--model"]),
        (["--config", "nowhere.yaml"], ["--config nowhere.yaml"]),
        (["--config"], ["--config"]),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_option(capsys, argv, parts):
    line = failure(capsys, 2, *argv)
    assert all(part in line for part in parts), line


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("modle: m\n", ["modle", "nearest is model"]),
        ("model: m\noptimiser: {lrr: 1}\n", ["optimiser.lrr", "nearest is optimiser.lr"]),
        ("model: [3]\n", ["--model", "[3]"]),
        ("- model\n", ["not a YAML file"]),
        ("", ["not a YAML file"]),
        ("model: [m\n", ["expected ',' or ']'"]),
    ],
)
def test_bad_file_is_one_line_that_names_it(capsys, config, text, parts):
    path = config(text)
    line = failure(capsys, 2, "--config", path)
    assert all(part in line for part in [path, *parts]), line


def test_a_file_of_options_runs_no_code(capsys, config, tmp_path, monkeypatch):
    (tmp_path / "harmful.py").write_text("open('imported', 'w')\nclass Harm: pass\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"class_path": "harmful.Harm"}
    assert call("--config", config("model: m\nextra: {class_path: harmful.Harm}\n"))[3] == spec
    assert call("--config", config("model: m\nanything: {class_path: harmful.Harm}\n"))[4] == spec
    failure(capsys, 2, "--config", config("model: m\noptimiser: {class_path: harmful.Harm}\n"))
    failure(capsys, 2, "--config", config("model: !!python/object/apply:harmful.Harm []\n"))
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(("fail", "status", "text"), [
    ("input", 2, "--mask first.png: is empty should hold an object"),
    ("interrupt", 130, "interrupted"),
    ("other", 1, "OSError: disk full"),
])
def test_failures_of_the_function(capsys, fail, status, text):
    assert failure(capsys, status, "--model", "m", "--fail", fail) == f"error: {text}\n"


def test_debug_adds_the_traceback(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(script, ["--model", "m", "--fail", "input", "--debug", "true"])
    assert "Traceback" in capsys.readouterr().err


def test_print_config_can_be_read_back(capsys, config):
    with pytest.raises(SystemExit, match="0"):
        run(script, ["--print_config", "--model", "m", "--devices", "[0,1]", "--optimiser.lr", "0.5"])
    assert call("--config", config(capsys.readouterr().out))[:3] == ("m", [0, 1], Optimiser(0.5, 3))


def test_help_says_what_the_docstring_says(capsys):
    with pytest.raises(SystemExit, match="0"):
        run(script, ["--help"])
    text = capsys.readouterr().out
    assert all(part in text for part in ("Do as the options say", "name of the model", "--optimiser.lr", "step size"))


def test_help_loads_no_framework():
    program = (
        "import sys\nfrom utils.cli import run\nfrom utils.fabric import make_fabric\n"
        "def main(a: int = 1, debug: bool = False):\n    'Help.'\n"
        "try:\n    run(main, ['--help'])\nexcept SystemExit:\n    assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[1])
