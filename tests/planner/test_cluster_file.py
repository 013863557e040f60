"""Clusters from files, topologies and calibrations: what is read, what is written back, and what is refused."""

import math

import pytest

from polyreme.errors import ConfigError
from polyreme.mesh import MeshShape
from polyreme.planner import calibration, cluster_file
from polyreme.planner.calibration import Measured, cluster_of, resized, to_yaml
from polyreme.planner.communication import group

OWN = """
device:
  {name: mine, flops: {bfloat16: 1e14}, memory: 8e10, bandwidth: 2e12, matmul: [[1e9, 0.5]], attention: [[1e9, 0.4]]}
devices_per_node: 4
nodes: 2
links:
  - {name: near, devices: 4, bandwidth: 3e11, latency: 5e-6}
  - {name: far, devices: 8, bandwidth: 2.5e10, latency: 1e-5, efficiency: [[0, 0.5], [1e6, 0.9]]}
"""


def measured(**changes):
    """A machine whose collectives take exactly as long as one with 10 us a hop and 2 GB/s takes: a ring, or, of a
    processor, one that moves all bytes."""
    n, hop, rate = 8, 1e-5, 2e9
    sizes = (256.0, 1e5, 1e6)
    hops = 2 * min(n - 1, 2 * math.log2(n))
    sent = 1 if changes.get("platform", "cpu") == "cpu" else (n - 1) / n
    reduce = [(size, hops * hop + (2 * sent * size / rate if size > 256 else 0)) for size in sizes]
    gather = [(size, (n - 1) * hop + (sent * size / rate if size > 256 else 0)) for size in sizes]
    values = {
        "kind": "cpu",
        "platform": "cpu",
        "num_devices": n,
        "memory": 1e9,
        "matmul": {"float32": [(1e5, 1e11), (1e7, 4e11)], "bfloat16": [(1e5, 1e11), (1e7, 2e11)]},
        "attention": [(1e6, 1e11)],
        "streaming": [(1e4, 1e10), (1e6, 2e10)],
        "few": [(1.0, 1e10), (8.0, 2e10)],
        "all_reduce": reduce,
        "all_gather": gather,
        "launch": 1e-6,
        "task": 1e-4,
    }
    return Measured(**(values | changes))


def write(folder, text):
    path = folder / "cluster.yaml"
    path.write_text(text)
    return path


def test_a_file_names_a_kind_or_gives_every_figure(tmp_path):
    known = cluster_file.read(write(tmp_path, "device: h100\ndevices_per_node: 4\nnodes: 16\nmemory: 9.0e10\n"))
    assert (known.num_devices, known.links[0].devices, known.device.memory) == (64, 4, 9e10)
    assert known.device.variation == 0.015
    told = cluster_file.read(write(tmp_path, "device: h100\nnodes: 4\nvariation: 0.03\n"))
    assert told.device.variation == 0.03
    narrow = cluster_file.read(write(tmp_path, OWN.replace("latency: 5e-6", "latency: 5e-6, oversubscription: 2")))
    assert {link.oversubscription for link in narrow.links} == {1.0, 2.0}
    own = cluster_file.read(write(tmp_path, OWN))
    assert (own.num_devices, own.device.flops, own.shared) == (8, {"bfloat16": 1e14}, 1)
    assert own.links[1].efficiency == ((0.0, 0.5), (1e6, 0.9))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("device: h10\n", "unknown device kind 'h10'; did you mean 'h100'"),
        ("device: h100\nnode: 2\n", "unknown node type '2'"),
        ("device: h100\ndevice_per_node: 2\n", "unknown key 'device_per_node'; did you mean 'devices_per_node'"),
        ("devices_per_node: 2\n", "device is missing"),
        ("device: h100\nnodes: 1.5\n", "nodes is 1.5; give a whole number"),
        ("device: h100\nnodes: [\n", "not YAML"),
        ("- h100\n", "needs key: value lines"),
        ("device: h100\nmemory: -1\n", "memory is -1; give a number above 0"),
        ("device: 3\n", "device is 3; give the name of a kind"),
        ("device: v5e\ntorus: 4\n", "torus is 4; give its lengths"),
        ("device: v5e\nnodes: 15\ntorus: [3, 5]\n", "no slice of 'v5e' has the lengths 3x5"),
        (OWN.replace("flops: {bfloat16: 1e14}", "flops: 3"), "flops is 3; give FLOP/s by dtype"),
        (OWN.replace("memory: 8e10, ", ""), "memory is missing"),
        (OWN.replace("latency: 5e-6", "latncy: 5e-6"), "unknown key 'latncy'; did you mean 'latency'"),
        (OWN.replace("devices: 8", "devices: 6"), "links join 6 of 8 devices"),
        (OWN.replace("devices: 8", "devices: 2"), "nearest first"),
        (OWN.replace("[[0, 0.5], [1e6, 0.9]]", "[[5, 0.5], [1, 2]]"), "sizes rising, shares above 0"),
        (OWN.replace("[[0, 0.5], [1e6, 0.9]]", "3"), "give points"),
        (OWN.split("links")[0], "links are missing"),
        (OWN.replace("links:", "links: 3\nx:"), "unknown key 'x'"),
        (OWN.split("links")[0] + "links: 3\n", "links is 3; give a list"),
        (OWN + "slices: 2\n", "slices is for a kind of devices.yaml"),
        (OWN + "shared: 3\n", "shared is 3; give 1, or 8"),
        ("device: h100\nvariation: 1\n", "variation is 1; give a share below 1"),
        (OWN.replace("latency: 5e-6", "latency: 5e-6, oversubscription: 0.5"), "oversubscription is 0.5; give 1 for"),
        (OWN + "task: -1\n", "task is -1; give a number of at least 0"),
        (OWN + "task: soon\n", "task is 'soon'; give a number"),
        (OWN.replace("memory: 8e10", "memory: 8e10, usable: 5"), "usable is 5; give a share of the memory"),
        (OWN.replace("latency: 5e-6", "latency: 5e-6, torus: 4"), "torus is 4; give its lengths"),
        (OWN.replace("latency: 5e-6", "latency: 5e-6, torus: [4, 4]"), "torus has 16 devices, the link joins 4"),
        (
            f"device: h100\nmemory: 1{'0' * 400}\n",
            "memory is 1000000000000000000000000000000000000000...; give a number",
        ),
        ("device: h100\nnodes: 99999999\n", "99,999,999 devices; give at most 16,777,216"),
        ("device: h100\nnodes: 2\nslices: 2\n", "slices is 2, but devices 'h100' are joined by switches"),
        (f"device: {'[' * 5000}", "not YAML"),
    ],
)
def test_what_a_file_may_not_say(tmp_path, text, problem):
    with pytest.raises(ConfigError, match=problem.replace("[", r"\[")):
        cluster_file.read(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path):
    write(tmp_path, OWN)
    with pytest.raises(ConfigError, match=r"no such cluster file; did you mean 'cluster.yaml'"):
        cluster_file.read(tmp_path / "clusters.yaml")
    with pytest.raises(ConfigError, match="is a folder"):
        cluster_file.read(tmp_path)
    (tmp_path / "cluster.yaml").write_bytes(b"device: \xff")
    with pytest.raises(ConfigError, match="byte 8 is not UTF-8"):
        cluster_file.read(tmp_path / "cluster.yaml")
    with pytest.raises(ConfigError, match="is the configuration of a run, not a cluster; give it as CONFIG"):
        cluster_file.read(write(tmp_path, "model: {family: gpt}\ndevice: cpu\n"))
    (tmp_path / "cluster.yaml").write_bytes(b"#" * (1 << 21))
    with pytest.raises(ConfigError, match="too long for a cluster file"):
        cluster_file.read(tmp_path / "cluster.yaml")


def test_topologies_as_text():
    pod, two = cluster_file.of_topology("v5e:16x16"), cluster_file.of_topology("v5e:2x16x16")
    assert (pod.num_devices, pod.links[0].torus) == (256, (16, 16))
    assert (two.num_devices, two.links[0].devices) == (512, 256)
    assert cluster_file.of_topology("a100:1024").num_devices == 1024
    half, single = cluster_file.of_topology("h100:16x4"), cluster_file.of_topology("h100:16x1")
    assert (half.num_devices, half.links[0].devices) == (64, 4)  # machines may have fewer than they usually do
    assert (single.num_devices, [link.name for link in single.links]) == (16, ["InfiniBand"])
    assert cluster_file.of_topology("v4:2x2x1").links[0].torus == (2, 2, 1)
    assert cluster_file.of_topology("v5p:1536").links[0].torus == (8, 12, 16)
    for text, problem in {
        "v5e": "needs KIND:SHAPE",
        "v5e:4y4": "needs KIND:SHAPE",
        "v5e:0x4": "needs KIND:SHAPE",
        "v5:4x4": "unknown device kind 'v5'",
        "v5e:2x2x2x2": "a torus of 2 dims",
        "h100:2x16": "of which a machine has 8",
        "v5e:3x5": r"no slice of 'v5e' has the lengths 3x5; give v5e:2x4 \(of 8\) or v5e:4x4 \(of 16\)",
        "v5e:2x1x8": r"has the lengths 1x8; give v5e:2x4 \(of 8\)\n",
        "v5p:96": r"has 96 devices; give v5p:4x4x4 \(of 64\) or v5p:4x4x8 \(of 128\)",
        "v6e:16x32": "give more slices",
    }.items():
        with pytest.raises(ConfigError, match=problem):
            cluster_file.of_topology(text)


def test_a_calibration_gives_the_figures_it_was_made_from(tmp_path):
    cluster = cluster_of(measured())
    assert (cluster.shared, cluster.device.flops["float32"], cluster.device.bandwidth) == (8, 4e11, 2e10)
    assert cluster.device.matmul == ((1e5, 0.25), (1e7, 1.0))
    assert cluster.device.few == ((1.0, 0.5), (8.0, 1.0))
    link = cluster.links[0]
    assert link.latency == pytest.approx(1e-5)
    assert link.bandwidth == pytest.approx(2e9)
    # the planner's formulas give back what was measured
    everyone = group(cluster, MeshShape(dp=8), ["dp"])
    (_, _, (nbytes, seconds)) = measured().all_reduce
    assert everyone.all_reduce(nbytes) == pytest.approx(seconds)
    assert everyone.all_gather(nbytes) == pytest.approx(measured().all_gather[2][1])
    assert cluster_file.read(write(tmp_path, to_yaml(cluster))) == cluster


def test_accelerators_do_not_share_their_units():
    cluster = cluster_of(measured(kind="H200", platform="gpu"))
    assert (cluster.shared, cluster.device.flops["float32"]) == (1, 4e11 / 8)
    assert resized(cluster, 4).num_devices == 4
    with pytest.raises(ConfigError, match="the calibrated machine has 8 of kind 'H200'"):
        resized(cluster, 16)
    assert cluster_of(measured(platform="gpu", num_devices=1, all_reduce=[], all_gather=[])).links == ()


def test_this_machine_is_calibrated_or_declared(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    declared = cluster_file.of_devices(8)
    assert (declared.num_devices, declared.shared, declared.links[0].devices) == (8, 8, 8)
    assert "calibrate" in declared.device.source
    path = calibration.calibration_file()
    path.parent.mkdir()
    path.write_text(to_yaml(cluster_of(measured())))
    four = cluster_file.of_devices(4)
    assert (four.num_devices, four.shared, four.device.memory) == (4, 4, 2e9)
    with pytest.raises(ConfigError, match="--devices 100000: give at most 65,536; for devices elsewhere, --topology"):
        cluster_file.of_devices(100_000)
    path.write_text("device: nothing\n")
    with pytest.raises(ConfigError, match="measures the machine again"):
        cluster_file.of_devices(4)
