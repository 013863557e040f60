"""`polyreme calibrate` as it is: every figure measured on the virtual devices is one that a cluster can have."""

import pytest

from polyreme.planner import cluster_file
from polyreme.planner.calibration import to_yaml
from polyreme.recipes.planning import calibrate


@pytest.mark.slow
def test_what_is_measured_is_a_cluster(tmp_path, monkeypatch):
    monkeypatch.setattr(calibrate, "_TIMES", 0.0)
    lines: list[str] = []
    cluster = calibrate.run(lines.append)
    assert (cluster.num_devices, cluster.shared) == (8, 8)
    assert [count for count, _ in cluster.device.few] == [1, 2, 4, 8]
    assert cluster.device.few[-1][1] == 1
    assert {"float32", "bfloat16"} <= set(cluster.device.flops)
    assert cluster.task >= 0
    starts = (
        "matmul float32",
        "matmul bfloat16",
        "attention",
        "memory",
        "attention on few",
        "all-reduce",
        "all-gather",
    )
    assert all(any(line.startswith(start) for line in lines) for start in (*starts, "operation", "pipeline task"))
    (tmp_path / "found.yaml").write_text(to_yaml(cluster))
    assert cluster_file.read(tmp_path / "found.yaml") == cluster
