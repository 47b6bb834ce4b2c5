"""Runs a model over a benchmark, scores it as the official toolkit does, and packs the submission.

python eval.py --model aott --checkpoint FILE --dataset davis2017 --data_root DIR --output_dir DIR
python eval.py --predictions DIR --dataset davis2017 --data_root DIR --output_dir DIR
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from utils.cli import run
from utils.errors import InputError

if TYPE_CHECKING:
    from data.benchmarks import Benchmark


def main(
    data_root: str,
    output_dir: str,
    dataset: str = "davis2017",
    split: str | None = None,
    model: str | None = None,
    checkpoint: str | None = None,
    predictions: str | None = None,
    score: bool | Literal["auto"] = "auto",
    preset: str | None = None,
    subset: bool = False,
    resolution: str = "480p",
    flip: bool = False,
    scales: str | float | list[float] = "1.0",
    long_term_gap: int | None = None,
    max_memory_frames: int | None = None,
    max_long_edge: int | None = None,
    max_short_edge: int | None = None,
    threads: int | None = None,
    compile: bool = False,
    accelerator: str = "auto",
    devices: int | str | list[int] = "auto",
    strategy: str = "auto",
    num_nodes: int = 1,
    precision: str = "auto",
    debug: bool = False,
) -> dict | None:
    """Run a model over a benchmark, score it and pack the submission; or score masks made elsewhere.

    A run that was stopped goes on when the same command is given again. Returns the content of scores.json, or None
    where nothing was scored and in all processes but the first.

    Args:
        data_root: Folder of the data set, in the layout its authors ship it in.
        output_dir: Where masks, scores, speed, report and submission go.
        dataset: davis2016, davis2017, youtubevos2018, youtubevos2019, mose, lvos, vost or folder.
        split: List or folder of videos; by default val or valid.
        model: Name of the model; our own weight files know it.
        checkpoint: Weights file.
        predictions: Score the masks of this folder, DIR/<video>/<frame>.png, and run no model.
        score: Whether to score; auto means where every frame has a true mask.
        preset: Scoring rules other than the data set's, one of davis2016, davis2017, youtubevos, mose, lvos, vost, all.
        subset: Score the videos that the predictions hold although others are missing.
        resolution: Of DAVIS frames, 480p or full; masks are written at 480p for both.
        flip: Average with the mirrored video.
        scales: Average over these scales, as in 1.0,1.3.
        long_term_gap: Every n-th frame enters the long-term memory; by default the model's own setting.
        max_memory_frames: Most frames in the long-term memory; by default no limit.
        max_long_edge: Frames are shrunk to this long edge; by default the model's setting, 1040 as published.
        max_short_edge: Frames are shrunk to this short edge; by default 624 when scales are given, else no limit.
        threads: CPU threads of each process; by default all cores. The last bits of the network's output depend on it.
        compile: Run the model through torch.compile; minutes at the start, for long runs on GPUs.
        accelerator: auto, cpu, cuda (gpu) or mps.
        devices: auto, a number, or indices as in 0,1.
        strategy: auto or one of Fabric's names.
        num_nodes: Number of machines.
        precision: auto (32-true), 32-true, 16-mixed or bf16-mixed; bf16-true also on CPUs that compute in it.
        debug: Show the traceback of an error.
    """
    options = dict(locals())
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # Threads of torch that wait actively take the cores from each other as soon as they are shared (20 times slower was
    # seen); read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    # 1. Masks made elsewhere: nothing to run, no device.
    if predictions is not None:
        from data.benchmarks import open_benchmark
        from utils.metrics import find_preset
        from utils.results import score_predictions

        benchmark = open_benchmark(dataset, data_root, split, resolution, with_frames=False)
        rules = find_preset(preset or benchmark.preset).name
        return score_predictions(benchmark, Path(predictions), Path(output_dir), rules, subset)

    # 2. What to run over, and how: what cannot be is said before anything slow starts.
    asked = plan(options)

    # 3. The model, loaded before any process is started, so that an unusable file is reported once.
    from utils.checkpoint import describe_weights, load_model
    from utils.evaluation import evaluate
    from utils.fabric import launch, make_fabric

    fabric = make_fabric(accelerator, devices, strategy, precision, num_nodes)
    if checkpoint is None:
        raise InputError("--checkpoint: missing; a weights file is needed (or --predictions, to score masks)")
    network, weights = load_model(checkpoint, model), describe_weights(checkpoint)

    # 4. Every process takes videos until none is left; the first one sums up.
    return launch(fabric, evaluate, network, weights, *asked)


def plan(options: dict[str, Any]) -> tuple["Benchmark", Path, dict[str, Any], str | None, int | None, bool]:
    """Videos, folder, the tracker's options, the rules to score by (None: not at all), threads, whether to compile.

    Args:
        options: of `main`, by name. These are what `utils.evaluation.evaluate` takes after the model and its weights.

    Raises:
        InputError: data that is not there or lacks what was asked for, an unknown data set or preset.
    """
    from data.benchmarks import open_benchmark
    from utils.metrics import find_preset
    from utils.options import EVALUATION, check_numbers

    o = options
    check_numbers(o, EVALUATION)
    benchmark = open_benchmark(o["dataset"], o["data_root"], o["split"], o["resolution"])
    rules = find_preset(o["preset"] or benchmark.preset).name
    if benchmark.unlabelled and o["score"] is True:
        raise InputError(
            f"{benchmark.truth / benchmark.unlabelled[0]}: lacks true masks, so --score true cannot be; "
            "leave it at auto and upload submission.zip"
        )
    scored = not benchmark.unlabelled if o["score"] == "auto" else o["score"]
    names = ("flip", "scales", "long_term_gap", "max_memory_frames", "max_long_edge", "max_short_edge")
    tracker = {name: o[name] for name in names} | {"scales": parse_scales(o["scales"])}
    if tracker["max_short_edge"] is None and tracker["scales"] != (1.0,):
        tracker["max_short_edge"] = 624  # as published: 1.3 x 480
    return benchmark, Path(o["output_dir"]), tracker, rules if scored else None, o["threads"], o["compile"]


def parse_scales(scales: str | float | list[float]) -> tuple[float, ...]:
    """Scales as written on the command line, "1.0,1.3", or as a list. Raises InputError."""
    try:
        values = scales.split(",") if isinstance(scales, str) else scales if isinstance(scales, list) else [scales]
        return tuple(float(value) for value in values)
    except ValueError:
        raise InputError(f"--scales {scales}: numbers separated by commas are needed, as in 1.0,1.3") from None


if __name__ == "__main__":
    run(main)
