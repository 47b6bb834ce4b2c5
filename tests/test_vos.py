"""The Python interface on the CPU: the same call for one device and several, from a script, a prompt and a notebook."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from training_cases import OPTIONS, checkpoint, difference, write_videos

from models import Tracker, build_model
from models.network import VOSNetwork
from utils.errors import InputError
from utils.fabric import processes_to_start
from utils.workers import WorkerError
from vos import VOS, TrainResult

ROOT = Path(__file__).resolve().parents[1]
BRIEF = {name: value for name, value in OPTIONS.items() if name != "encoder"} | {
    "log_every": 1, "save_every": 2, "precision": "64-true"
}
LEFT_OVERS = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1",
              "VOS_PARENT_PID": "0"}


def small_model(drops: bool = False) -> VOSNetwork:
    """The same weights each time; what is random in it while training depends on how clips are grouped."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = build_model("aott", encoder="timm/test_efficientnet")
    for module in () if drops else model.modules():
        if isinstance(module, torch.nn.Dropout2d):
            module.p = 0.0
        if hasattr(module, "drop_prob"):
            module.drop_prob = 0.0
    return model


def processes_with(text: str) -> list[int]:
    """Processes that have `text` on their command line; zombies have none."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # ended meanwhile
            continue
    return found


def gone(folder: Path) -> bool:
    """Whether workers with temporary files in `folder` have all ended and left nothing there, after a while."""
    deadline = time.monotonic() + 30
    while processes_with(f"{folder}/vos_") or list(folder.glob("vos_*")):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_videos(tmp_path_factory.mktemp("videos"))


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, here and in processes that a test starts."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


class Run:
    """A training by `devices` processes, into a folder in which a user has files."""

    def __init__(self, videos: Path, folder: Path, devices: int):
        self.folder, self.events = folder, []
        (folder / "checkpoints" / "mine").mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
        (folder / "checkpoints" / "mine" / "step_1.ckpt").write_text("mine")
        self.vos = VOS(small_model())
        self.result = self.vos.train(
            BRIEF,
            data_root=videos,
            output_dir=folder,
            devices=devices,
            total_steps=4,
            on_step=lambda row: self.events.append(("step", row, os.getpid())),
            on_checkpoint=lambda files: self.events.append(("checkpoint", files, os.getpid())),
            on_end=lambda end: self.events.append(("end", end, os.getpid())),
        )


@pytest.fixture(scope="module")
def runs(videos: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LEFT_OVERS.items():
            patch.setenv(name, value)
        return {devices: Run(videos, tmp_path_factory.mktemp(f"run{devices}"), devices) for devices in (2, 1)}


def test_one_and_two_devices_give_the_same_weights(runs):
    one, two = (checkpoint(runs[devices].folder, 4) for devices in (1, 2))
    assert difference(checkpoint(runs[1].folder, 2)["model"], one["model"]) > 1e-4
    for part in ("model", "ema"):
        assert difference(one[part], two[part]) < 1e-9


def test_closures_are_called_here_with_the_same_plain_data(runs):
    steps = {}
    for devices, run in runs.items():
        assert [name for name, _, _ in run.events] == ["step", "step", "checkpoint"] * 2 + ["end"]
        assert {process for _, _, process in run.events} == {os.getpid()}
        assert json.loads(json.dumps([data for _, data, _ in run.events])) == [data for _, data, _ in run.events]
        steps[devices] = [data for name, data, _ in run.events if name == "step"]
        assert run.events[-1][1] == {
            "step": 4, "checkpoint": str(run.result.checkpoint), "output_dir": str(run.folder)
        }
        assert all(Path(data[key]).is_file() for _, data, _ in run.events[2::3] for key in ("checkpoint", "resume"))
    for one, two in zip(steps[1], steps[2], strict=True):
        assert one.keys() == two.keys() > {"step", "loss", "iou", "lr", "grad_norm"}
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-6)  # summed up in float32


def test_result_and_model(runs, tmp_path):
    for run in runs.values():
        assert type(run.result) is TrainResult and run.result.step == 4
        assert run.result.output_dir == run.folder and run.result.metrics == run.vos.metrics
        assert [row["step"] for row in run.result.metrics] == [1, 2, 3, 4]
        assert run.result.metrics == [data for name, data, _ in run.events if name == "step"]
        from_file = VOS(checkpoint=run.result.checkpoint)
        saved = VOS(checkpoint=run.vos.save(tmp_path / "saved.safetensors"))
        assert saved._kind == "ema" and saved.model.settings == run.vos.model.settings
        for model in (from_file.model, saved.model):
            assert difference(model.state_dict(), run.vos.model.state_dict()) == 0
        averages = checkpoint(run.folder, 4)["ema"]["shadow"]
        weights = {name: run.vos.model.state_dict()[name].double() for name in averages}
        assert difference(weights, averages) < 1e-6
        assert not run.vos.model.training


def test_files_of_a_user_stay(runs):
    for run in runs.values():
        assert (run.folder / "notes.txt").read_text() == "mine"
        assert (run.folder / "checkpoints" / "mine" / "step_1.ckpt").read_text() == "mine"


class OnPurpose(Exception):
    def __init__(self, clip: str, number: int):
        super().__init__(clip, number)


class FailsOnRankOne(VOSNetwork):
    def forward(self, *args, **options):
        if torch.distributed.get_rank() == 1:
            raise OnPurpose("blackswan", 7)
        time.sleep(600)  # busy, and in no collective that would fail


def test_exception_of_a_rank_is_raised_here_and_ends_the_others(videos, temporary, tmp_path):
    vos = VOS(small_model())
    vos.model.__class__ = FailsOnRankOne
    before = {name: value.clone() for name, value in vos.model.state_dict().items()}
    with pytest.raises(OnPurpose) as caught:
        vos.train(BRIEF, data_root=videos, output_dir=tmp_path / "out", devices=2)
    assert caught.value.args == ("blackswan", 7)
    cause = caught.value.__cause__
    assert isinstance(cause, WorkerError) and "rank 1 of 2" in str(cause)
    assert "Traceback" in str(cause) and "in forward" in str(cause) and __file__ in str(cause)
    assert gone(temporary)
    assert difference(before, vos.model.state_dict()) == 0


def test_interrupt_saves_and_leaves_no_process(videos, temporary, tmp_path):
    """Ctrl-C while this process waits for the workers; then the same object trains on."""
    vos, steps = VOS(small_model()), []

    def note(row):
        steps.append(row["step"])
        if len(steps) == 2:
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        vos.train(BRIEF, data_root=videos, output_dir=tmp_path / "out", devices=2, total_steps=10000, on_step=note)
    assert gone(temporary)
    assert signal.getsignal(signal.SIGINT) is handler
    weights = tmp_path / "out" / "checkpoints" / f"ema_{steps[-1]}.safetensors"
    assert difference(VOS(checkpoint=weights).model.state_dict(), vos.model.state_dict()) == 0
    result = vos.train(BRIEF, data_root=videos, output_dir=tmp_path / "out", devices=1, total_steps=steps[-1] + 1)
    assert [row["step"] for row in result.metrics] == [*steps, steps[-1] + 1]


PROGRAM = """
from models import build_model
from vos import VOS
open("started.txt", "a").write("once ")
vos, steps = VOS(build_model("aott", encoder="timm/test_efficientnet")), []
def note(row):
    steps.append(row["step"])
    print("step", row["step"], flush=True)

result = vos.train({options!r}, data_root={videos!r}, devices=2, total_steps={steps}, on_step=note)
print("result", type(result).__name__, steps, result.output_dir, result.checkpoint.is_file(), flush=True)
"""


def test_two_programs_at_once_without_main_guard_and_at_a_prompt(videos, temporary, tmp_path):
    """One is a script and finishes; the other is typed at a prompt, and killed while it trains."""
    started = {}
    for name, steps in (("script", 3), ("prompt", 10000)):
        folder = tmp_path / name
        folder.mkdir()
        program = folder / "train.py"  # that a script of the project has this name must not matter
        program.write_text(PROGRAM.format(options=BRIEF, videos=str(videos), steps=steps))
        (folder / "tmp").mkdir()
        with open(program) if name == "prompt" else open(os.devnull) as keys, open(folder / "err.txt", "w") as errors:
            started[name] = subprocess.Popen(
                [sys.executable, "-i", "-q"] if name == "prompt" else [sys.executable, program.name],
                cwd=folder, stdin=keys, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=os.environ | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)},
            )
    script, prompt = started.values()
    for line in prompt.stdout:
        if "step 2" in line:
            break
    assert len(processes_with(f"{tmp_path / 'prompt' / 'tmp'}/vos_")) == 2
    prompt.kill()
    prompt.wait()
    prompt.stdout.close()
    assert gone(tmp_path / "prompt" / "tmp")
    output, _ = script.communicate()
    errors = (tmp_path / "script" / "err.txt").read_text()
    assert script.returncode == 0, errors
    assert "result TrainResult [1, 2, 3] runs/train_aott_" in output and output.strip().endswith("True")
    assert (tmp_path / "script" / "started.txt").read_text() == "once "
    assert gone(tmp_path / "script" / "tmp")


def train_in_group(rank: int, world_size: int, videos: Path, output: Path) -> tuple:
    torch.set_num_threads(1)
    steps = []
    result = VOS(small_model()).train(
        BRIEF, data_root=videos, output_dir=output, total_steps=2, on_step=lambda row: steps.append(row["step"])
    )
    return type(result).__name__, result.step, len(result.metrics), steps


def test_a_launcher_gives_the_group(gloo_pool, videos, runs, tmp_path):
    assert gloo_pool.run(train_in_group, videos, tmp_path / "out", timeout=400) == [
        ("TrainResult", 2, 2, [1, 2]), ("TrainResult", 2, 2, [])
    ]
    assert not list((tmp_path / "temporary").glob("vos_*"))


def test_what_cannot_travel_is_refused_by_name(videos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    vos = VOS(small_model())
    vos.model.__class__ = type("Net", (VOSNetwork,), {"__module__": "__main__"})
    with pytest.raises(InputError, match="model: .*class Net of __main__"):
        vos.train(BRIEF, data_root=videos, devices=2)
    vos = VOS(small_model())
    vos.model.decoder.activation = lambda x: x
    with pytest.raises(InputError, match="model: .*function .*<lambda> of test_vos"):
        vos.train(BRIEF, data_root=videos, devices=2)
    with pytest.raises(InputError, match="datasets: .*object"):
        VOS(small_model()).train(BRIEF, data_root=videos, devices=2, datasets=[object()])
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(("options", "message"), [
    ({"batch_size": 5, "devices": 2}, "--batch_size 5 cannot be split over 2 processes .* take 4 or 6"),
    ({"batch_size": 1, "devices": 2}, "take 2"),
    ({"devices": "cuda:99", "accelerator": "auto"}, "this machine has only .*cpu"),
    ({"devices": "0,0", "accelerator": "auto"}, "--devices 0,0: .*each once"),
    ({"devices": [0, 1]}, "this machine has only .*cpu"),
    ({"num_nodes": 2}, "--num_nodes 2: several machines need a launcher"),
    ({"total_step": 3}, "no option --total_step; the nearest is --total_steps"),
    ({"lr": "fast"}, "--lr"),
    ({"model": "aott"}, "model: belongs to VOS"),
    ({"data_root": "nowhere"}, "nowhere"),
])
def test_unusable_options_start_nothing(videos, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        VOS(small_model()).train(BRIEF, **{"data_root": videos, "output_dir": tmp_path / "out"} | options)
    assert not (tmp_path / "out").exists()


def test_configuration_file_for_another_model(videos, tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text("model: deaott\nlr: 1e-3\n")
    with pytest.raises(InputError, match="its model is deaott, this model's aott"):
        VOS(small_model()).train(config, data_root=videos)


@pytest.mark.parametrize(("options", "processes"), [
    ({"accelerator": "cpu", "devices": 2}, 2), ({"accelerator": "cpu", "devices": "3"}, 3), ({"devices": "cpu"}, 1),
    ({"accelerator": "cpu"}, 1), ({"accelerator": "cpu", "devices": 2, "strategy": "dp"}, 1),
])
def test_processes_to_start(options, processes):
    assert processes_to_start(**options) == processes


def test_scores_are_those_of_the_script(runs, videos, tmp_path, monkeypatch):
    import eval as script

    monkeypatch.chdir(tmp_path)
    vos, weights = runs[2].vos, runs[2].result.checkpoint
    options = {"data_root": str(videos), "dataset": "folder", "accelerator": "cpu", "threads": 1}
    script.main(output_dir="script", checkpoint=str(weights), devices=1, **options)
    expected = json.loads((tmp_path / "script" / "scores.json").read_text())
    assert vos.evaluate(devices=1, output_dir="one", **options) == expected
    assert vos.evaluate(devices=2, **options) == expected
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("eval_aott_folder_") and (folder / "submission.zip").is_file()
    with torch.no_grad():
        next(vos.model.parameters()).add_(1e-4)
    changed = vos.evaluate(devices=1, output_dir="changed", **options)["weights"]
    assert changed["file"] is None and changed["sha256"] != expected["weights"]["sha256"]
    with pytest.raises(InputError, match="checkpoint: belongs to VOS"):
        vos.evaluate(checkpoint="x", **options)


def test_tracking_is_that_of_the_tracker(videos):
    from data.masks import read_mask
    from data.video import open_frames

    vos = VOS(small_model(drops=True))
    frames, masks = videos / "JPEGImages" / "video1", videos / "Annotations" / "video1"
    predictions = list(vos.track(frames, masks / "00000.png", accelerator="cpu"))
    tracker, mask = Tracker(vos.model), read_mask(masks / "00000.png").labels
    assert len(predictions) == 8
    for frame, prediction in zip(open_frames(frames), predictions, strict=True):
        assert np.array_equal(prediction.labels, tracker.step(frame.image, mask).labels)
        mask = None
    with pytest.raises(InputError, match="one device"):
        vos.track(frames, masks / "00000.png", accelerator="cpu", devices=2)


def test_models_of_a_call(tmp_path):
    assert VOS("deaott").model.name == "deaott"
    with pytest.raises(InputError, match="model: a Linear"):
        VOS(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match="no such file"):
        VOS("aott", checkpoint=tmp_path / "none.safetensors")


def test_quickstart_notebook(temporary, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    path = ROOT / "examples" / "quickstart.ipynb"
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}}).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) >= 2
    assert "(4, 'ema_4.safetensors', " in str(outputs) and "J&F" in str(outputs)
    assert gone(temporary)
