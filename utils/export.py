"""Weights for others: half the size, with the settings that suit them.

python -m utils.export --checkpoint runs/mine/checkpoints/ema_100000.safetensors --output mine.safetensors
"""

from pathlib import Path

from utils.cli import run


def main(
    checkpoint: Path,
    output: Path,
    model: str | None = None,
    half: bool = True,
    max_long_edge: int | None = None,
    memory_gap: int | None = None,
    group_size: int | None = None,
    object_edge: int | None = None,
    debug: bool = False,
) -> None:
    """Write a weights file that eval.py, demo.py and Tracker take as it is.

    Args:
        checkpoint: Weights to read.
        output: File to write (.safetensors).
        model: Name of the model, for files that do not carry it.
        half: Store float16.
        max_long_edge: Long edge that frames are shrunk to by default; kept as it is when not given.
        memory_gap: Every how many frames one enters the long-term memory by default, 0: none; kept when not given.
        group_size: Objects that are tracked together; kept when not given.
        object_edge: Edge in the network's input that small objects are enlarged to; kept when not given.
        debug: Show the traceback of an error.
    """
    from dataclasses import asdict

    from models.registry import model_settings
    from utils.checkpoint import describe_weights, load_model, save_weights

    network = load_model(checkpoint, model)
    given = {"max_long_edge": max_long_edge, "group_size": group_size, "object_edge": object_edge}
    changes = {name: value for name, value in given.items() if value is not None}
    if memory_gap is not None:
        changes["memory_gap_test"] = memory_gap or None
    network.settings = model_settings(network.name, **asdict(network.settings) | changes)
    save_weights(network, output, kind=describe_weights(checkpoint)["kind"], half=half)
    print(f"{output}: {network.name}, {output.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    run(main)
