"""The programs in benchmarks/ run and report; their figures are for people to judge."""

import json

from training_cases import write_videos

from benchmarks import long_video, track
from benchmarks import train as training


def test_track(tmp_path):
    output = tmp_path / "rows.json"
    track.main(["aott"], sizes=[(48, 64)], objects=[1, 12], runs=1, naive=True, output=output, accelerator="cpu")
    rows = json.loads(output.read_text())
    assert [row["objects"] for row in rows] == [1, 12]
    assert all(row["ms"] > 0 and row["naive_ms"] > 0 and row["gflop"] > 0 for row in rows)
    assert rows[1]["gflop"] > rows[0]["gflop"]


def test_long_video(tmp_path):
    output = tmp_path / "rows.json"
    options = {"size": (48, 64), "max_memory_frames": 2, "naive_frames": 12}
    long_video.main(["aotl"], frames=12, marks=[6, 12], output=output, accelerator="cpu", **options)
    rows = json.loads(output.read_text())
    assert [(row["model"], row["frame"], row["memory_frames"]) for row in rows] == [
        ("aotl", 6, 2), ("aotl", 12, 2), ("aotl (naive)", 12, 3),
    ]  # fmt: skip


def test_train(tmp_path):
    output = tmp_path / "result.json"
    small = {"crop": (49, 49), "short_edge": 48, "frames": 3, "batch_size": 2, "workers": 1, "steps": 1}
    videos = write_videos(tmp_path / "videos")
    training.main(str(videos), [{"kind": "video"}], output=output, accelerator="cpu", **small)
    result = json.loads(output.read_text())
    assert result["naive_over_real"] > 0 and result["loader_clips_per_s"] > 0
    assert set(result["real"]["seconds"]) >= {"data", "forward", "backward", "optimiser", "reduction"}
