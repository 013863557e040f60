"""Jobs that a scheduler starts: what is submitted, how a launcher finds its place; real SLURM and Ray on loopback."""

import contextlib
import importlib
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from polyreme.distributed.job.rendezvous import Address
from polyreme.distributed.launch import main, options
from polyreme.distributed.launch.schedulers import SCHEDULERS, Submission
from polyreme.distributed.launch.schedulers.base import EXIT_CODE_FILE, read_settings
from polyreme.distributed.launch.schedulers.kubernetes import manifests
from polyreme.distributed.launch.schedulers.slurm import hostnames
from polyreme.errors import ConfigError
from tests.distributed.launch_scripts import STEPS, write
from tests.distributed.slurm_cluster import SlurmCluster, missing_programs

STEP = {
    "SLURM_JOB_ID": "41234",
    "SLURM_STEP_NODELIST": "127.0.0.[1-3]",
    "SLURM_JOB_NODELIST": "127.0.0.[1-4]",
    "SLURM_NODEID": "2",
    "SLURM_LOCALID": "0",
}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1", "POD_IP": "10.0.0.9"}


@pytest.fixture
def script(tmp_path):
    return str(write(tmp_path, "print(1)"))


# SLURM's lists of nodes


@given(
    st.lists(
        st.tuples(st.sampled_from(["n", "gpu-", "a1b", "rack2x"]), st.integers(0, 30), st.integers(0, 12)),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_lists_of_nodes_are_spelled_out(parts, width):
    text = ",".join(f"{name}[{low:0{width}d}-{low + count:0{width}d}]" for name, low, count in parts)
    named = [f"{name}{n:0{width}d}" for name, low, count in parts for n in range(low, low + count + 1)]
    assert hostnames(text) == named
    assert hostnames(",".join(named)) == named


@pytest.mark.parametrize("text", ["", "a[1-2", "a1-2]", "a[]", "a[2-1]", "a[x]", "a,,b", "a[1-9999999]", "a[[1]]"])
def test_what_is_no_list_of_nodes_is_refused(text):
    with pytest.raises(ConfigError, match="no list of SLURM's nodes"):
        hostnames(text)


# a launcher's place in a job


def test_a_launcher_in_a_step_of_srun_knows_its_place(script):
    told = options.parse([script], STEP)
    assert (told.node, told.min_nodes, told.max_nodes, told.host) == (2, 3, 3, "127.0.0.3")
    assert (told.master, told.job_id, told.scheduler) == (Address("127.0.0.1", 21234), "slurm-41234", "slurm")
    assert told.submission is None
    assert told.signals_ranks
    elastic = options.parse(["--nnodes", "1:3", script], STEP)
    assert (elastic.min_nodes, elastic.max_nodes, elastic.node) == (1, 3, 2)


def test_flags_that_say_where_nodes_are_win_over_a_step(script):
    by_hand = options.parse(["--nnodes", "3", "--rank", "1", "--master", "10.0.0.1:80", script], STEP)
    assert (by_hand.node, by_hand.master, by_hand.scheduler) == (1, Address("10.0.0.1", 80), "local")
    assert options.parse(["--on", "local", script], STEP).max_nodes == 1
    assert options.parse(["--nnodes", "1", script], STEP).scheduler == "local"
    assert options.parse([script], STEP | {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_NODEID": "0"}).max_nodes == 1


def test_an_allocation_of_several_nodes_gets_a_step_of_its_own(script):
    job = options.parse([script], {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "1"}).submission
    assert job is not None
    assert job.words == ("--", script)
    assert options.parse([script], {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_ID": "1"}).submission is None


def test_a_pod_of_an_indexed_job_knows_its_place(script):
    told = options.parse(["--on", "k8s", "--nnodes", "2", "--master", "j-0.j:6070", script], POD)
    assert (told.node, told.host, told.master) == (1, "10.0.0.9", Address("j-0.j", 6070))


@pytest.mark.parametrize(
    ("words", "environment", "match"),
    [
        (["--on", "slrum"], {}, "--on slrum: give local, slurm, ray, k8s or auto; did you mean 'slurm'"),
        (["--on", "slurm", "--master", "a:1"], {}, "--master 'a:1': is not for --on slurm, which chooses the nodes"),
        (["--on", "slurm", "--rank", "1"], {}, "--rank '1': is not for --on slurm"),
        (["--dry_run"], {}, "--on local submits nothing"),
        (["--wait"], STEP, "this launcher is in slurm's job"),
        (["--job_options", "time=1"], {}, "--on local submits nothing"),
        (["--on", "slurm", "--job_options", "time='1"], {}, "No closing quotation"),
        (["--on", "slurm", "--job_options", "time=1 time=2"], {}, "time is given twice"),
        (["--on", "slurm", "--job_options", "=5"], {}, "'=5' is not NAME=VALUE"),
        (["--on", "ray", "--job_options", "gpu=5"], {}, "--on ray has none of that name; did you mean 'gpus'"),
        (["--on", "slurm"], STEP | {"SLURM_LOCALID": "1"}, "several launchers on a node; give it --ntasks-per-node=1"),
    ],
    ids=lambda value: " ".join(value)[:28] if isinstance(value, list) else "",
)
def test_what_no_scheduler_can_do_is_refused(words, environment, match, script):
    with pytest.raises(ConfigError, match=match):
        options.parse([*words, script], environment)


# what is submitted


def test_settings_of_a_scheduler_are_read_as_a_shell_reads_them():
    assert read_settings("time=1:00:00 --exclusive comment='a b'", "x") == {
        "time": "1:00:00",
        "exclusive": "",
        "comment": "a b",
    }


def test_the_script_for_sbatch_asks_for_the_nodes_and_for_another_turn(script, capsys):
    words = ["--nnodes", "1:4", "--nproc_per_node", "2", "--job_options", "time=1:00:00 gres=gpu:8 comment='a b'"]
    assert main(["--on", "slurm", "--dry_run", *words, script, "--lr", "1e-4"]) == 0
    said = capsys.readouterr().out
    for line in ("nodes=1-4", "ntasks-per-node=1", "time=1:00:00", "gres=gpu:8", 'comment="a b"', "requeue", "no-kill"):
        assert f"#SBATCH --{line}\n" in said
    assert f"polyreme.distributed.launch --on slurm --nnodes=1:4 --nproc_per_node=2 -- {script} --lr 1e-4\n" in said
    assert "--no-kill" in next(line for line in said.splitlines() if line.startswith("srun "))
    assert subprocess.run(["bash", "-n"], input=said, text=True, check=False).returncode == 0
    assert main(["--on", "slurm", "--dry_run", "--nnodes", "2", script]) == 0
    assert "no-kill" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "told", "again"), [(0, 0, False), (75, 75, True), (70, 70, False), (9, 0, False)], ids=str
)
def test_the_script_for_sbatch_ends_with_the_job_s_exit_code(tmp_path, script, capsys, monkeypatch, code, told, again):
    """srun and scontrol are scripts that note how they are called; node 0's launcher told 0 where srun ended with 9."""
    monkeypatch.chdir(tmp_path)
    main(["--on", "slurm", "--dry_run", "--nnodes", "2", script])
    said = capsys.readouterr().out
    (tmp_path / "log").mkdir()
    left = f"echo {told} > log/{EXIT_CODE_FILE}; " if told != code else ""
    for name, body in {"srun": f"{left}exit {code}", "scontrol": 'echo "$@" > requeued'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    (tmp_path / "log" / EXIT_CODE_FILE).write_text("3\n")  # of an earlier turn
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash"], input=said, text=True, env=environment, check=False).returncode == told
    assert (tmp_path / "requeued").exists() == again
    if again:
        assert (tmp_path / "requeued").read_text() == "requeue 7\n"


FIELDS = {
    "Secret": ("apiVersion kind metadata", "type stringData"),
    "Service": ("apiVersion kind metadata spec", ""),
    "Job": ("apiVersion kind metadata spec", ""),
    "JobSet": ("apiVersion kind metadata spec", ""),
    "metadata": ("", "name namespace labels"),
    "Service.spec": ("", "clusterIP publishNotReadyAddresses selector ports"),
    "JobSet.spec": ("", "replicatedJobs network successPolicy failurePolicy startupPolicy suspend coordinator "
                    "managedBy ttlSecondsAfterFinished"),
    "network": ("", "enableDNSHostnames subdomain publishNotReadyAddresses"),
    "failurePolicy": ("", "maxRestarts restartStrategy rules"),
    "replicatedJobs": ("name template", "replicas dependsOn groupName"),
    "replicatedJobs.template": ("", "metadata spec"),
    "Job.spec": ("template", "completionMode completions parallelism backoffLimit podFailurePolicy suspend "
                 "activeDeadlineSeconds ttlSecondsAfterFinished"),
    "podFailurePolicy": ("rules", ""),
    "rules": ("action", "onExitCodes onPodConditions"),
    "onExitCodes": ("operator values", "containerName"),
    "onPodConditions": ("type status", ""),
    "Job.spec.template": ("", "metadata spec"),
    "Pod.spec": ("containers", "restartPolicy terminationGracePeriodSeconds volumes subdomain serviceAccountName"),
    "containers": ("name", "image command args env ports resources volumeMounts"),
    "env": ("name", "value valueFrom"),
    "volumes": ("name", "emptyDir persistentVolumeClaim"),
    "volumeMounts": ("name mountPath", "readOnly subPath"),
}  # fmt: skip
"""Of each object: the fields that its API (v1, batch/v1, jobset.x-k8s.io/v1alpha2) requires, and others it takes."""


def check_fields(kind: str, value: dict) -> None:
    required, others = (text.split() for text in FIELDS[kind])
    assert set(required) <= set(value) <= {*required, *others}, (kind, value)


def check_job(spec: dict, has_subdomain: bool) -> dict:
    """The pod's spec of a Job's."""
    check_fields("Job.spec", spec)
    check_fields("podFailurePolicy", spec["podFailurePolicy"])
    for rule in spec["podFailurePolicy"]["rules"]:
        check_fields("rules", rule)
        assert rule["action"] in ("FailJob", "Ignore", "Count")
        assert len(rule) == 2  # one condition each
        for condition in rule.get("onPodConditions", []):
            check_fields("onPodConditions", condition)
        if "onExitCodes" in rule:
            check_fields("onExitCodes", rule["onExitCodes"])
            values = rule["onExitCodes"]["values"]
            assert values == sorted(set(values))
            assert 0 not in values
    pod = spec["template"]["spec"]
    check_fields("Pod.spec", pod)
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    assert ("subdomain" in pod) == has_subdomain
    for name in ("containers", "volumes"):
        for part in pod.get(name, []):
            check_fields(name, part)
    (container,) = pod["containers"]
    for name in ("env", "volumeMounts"):
        for part in container.get(name, []):
            check_fields(name, part)
    return pod


def submission(script: str, *words: str) -> Submission:
    job = options.parse(["--on", "k8s", *words, script], {}).submission
    assert job is not None
    return job


@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_manifests_have_the_fields_of_their_api(kind, script):
    settings = f"image=i:1 kind={kind} gpus=8 cpus=16 memory=64Gi shm=16Gi claim=work:/work namespace=train"
    job = submission(script, "--nnodes", "2:4", "--job_id", "kjv", "--job_options", settings)
    secret, *parts = yaml.safe_load_all(yaml.safe_dump_all(manifests(job)))
    for part in (secret, *parts):
        check_fields(part["kind"], part)
        check_fields("metadata", part["metadata"])
        assert (part["metadata"]["name"], part["metadata"]["namespace"]) == ("kjv", "train")
    check_fields("Secret", secret)
    if kind == "jobset":
        (whole,) = parts
        check_fields("JobSet.spec", whole["spec"])
        check_fields("network", whole["spec"]["network"])
        check_fields("failurePolicy", whole["spec"]["failurePolicy"])
        (replicated,) = whole["spec"]["replicatedJobs"]
        check_fields("replicatedJobs", replicated)
        spec, first = (
            replicated["template"]["spec"],
            f"kjv-{replicated['name']}-0-0.{whole['spec']['network']['subdomain']}",
        )
    else:
        service, whole = parts
        check_fields("Service.spec", service["spec"])
        assert service["spec"]["clusterIP"] == "None"
        spec, first = whole["spec"], f"kjv-0.{service['metadata']['name']}"
    pod = check_job(spec, has_subdomain=kind == "job")
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "64Gi", "nvidia.com/gpu": "8"}
    # the command in the pod says the same as the command here
    words = container["command"][container["command"].index("polyreme.distributed.launch") + 1 :]
    told = options.parse(words, POD)
    assert (told.master, told.node, told.min_nodes, told.max_nodes) == (Address(first, 6070), 1, 2, 4)
    assert (told.script, told.job_id) == (script, "kjv")


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["jobset", "job"])
def test_manifests_pass_the_schemas_of_kubernetes(kind, script):
    """Every object but the JobSet itself, whose fields FIELDS has; where kubernetes-validate is installed."""
    validate = pytest.importorskip("kubernetes_validate").validate
    settings = f"image=i:1 kind={kind} gpus=8 cpus=16 memory=64Gi shm=16Gi claim=work:/work namespace=train"
    job = submission(script, "--nnodes", "2:4", "--job_id", "kjv", "--job_options", settings)
    for whole in manifests(job):
        if whole["kind"] == "JobSet":
            (replicated,) = whole["spec"]["replicatedJobs"]
            whole = {**whole, "apiVersion": "batch/v1", "kind": "Job", "spec": replicated["template"]["spec"]}
        for version in ("1.29", "1.33", "1.36"):
            validate(whole, version, strict=True)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "--on k8s needs --job_options image=IMAGE"),
        (["--job_id", "KJV", "--job_options", "image=i"], "--job_id KJV: Kubernetes takes at most 40 of a-z"),
        (["--job_options", "image=i kind=pod"], "kind=pod: give jobset or job"),
        (["--job_options", "image=i gpus=two"], "gpus=two: needs a whole number"),
        (["--job_options", "image=i claim=work"], "claim=work: give NAME:/PATH"),
    ],
    ids=str,
)
def test_manifests_that_kubernetes_would_refuse_are_refused(words, match, script):
    with pytest.raises(ConfigError, match=match):
        manifests(submission(script, *words))


def test_manifests_are_handed_to_kubectl(script, tmp_path, monkeypatch, capsys):
    words = ["--on", "k8s", "--job_options", "image=i", script]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(words) == 2
    assert "kubectl is not installed; use --dry_run" in capsys.readouterr().err
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/said\n/bin/cat >> {tmp_path}/said\n')
    (tmp_path / "kubectl").chmod(stat.S_IRWXU)
    assert main(words) == 0
    command, _, text = (tmp_path / "said").read_text().partition("\n")
    assert command == "apply -f -"
    assert [part["kind"] for part in yaml.safe_load_all(text)] == ["Secret", "JobSet"]


@pytest.mark.parametrize(("name", "match"), [("slurm", "sbatch is not here"), ("ray", r"polyreme\[ray\]")])
def test_a_scheduler_that_is_not_here_is_named(name, match, script, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.chdir(tmp_path)
    assert main(["--on", name, script]) == 2
    assert re.search(match, capsys.readouterr().err)
    assert {*SCHEDULERS} == {"slurm", "ray", "k8s"}


class PretendedRay:
    """A cluster of one node of two processors, where nothing can be placed."""

    is_initialized = staticmethod(lambda: True)
    shutdown = staticmethod(lambda: None)
    PlacementGroupSchedulingStrategy = None

    @staticmethod
    def nodes():
        return [{"Alive": True, "Resources": {"CPU": 2}}, {"Alive": False, "Resources": {"CPU": 9}}]

    @staticmethod
    def placement_group(bundles, strategy):
        assert (bundles, strategy) == ([{"CPU": 2}], "STRICT_SPREAD")
        return type("Group", (), {"wait": staticmethod(lambda seconds: False)})()

    remove_placement_group = staticmethod(lambda group: None)


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["--nnodes", "2"], "1 nodes have {'CPU': 1}, the job needs 2; lower --nnodes"),
        (["--job_options", "cpus=3"], "0 nodes have {'CPU': 3}, the job needs 1"),
        (["--nnodes", "1:3", "--job_options", "cpus=2"], "1 x {'CPU': 2} could not be placed in 120 s"),
    ],
    ids=str,
)
def test_what_a_cluster_of_ray_s_has_no_place_for_is_said(words, match, script, monkeypatch, capsys):
    for name in ("ray", "ray.util.placement_group", "ray.util.scheduling_strategies"):
        monkeypatch.setitem(sys.modules, name, PretendedRay)
    assert main(["--on", "ray", *words, script]) == 2
    assert match in capsys.readouterr().err


# real schedulers


LIMIT = 240
"""Seconds that a job may take to end or to reach a step: on a busy machine most of it is starting processes."""


class ScheduledJob:
    """A job that is submitted from a folder of its own."""

    def __init__(self, folder: Path, flags: list[str], steps: int, **variables: str) -> None:
        folder.mkdir()
        self.folder = folder
        quick = {"CPU_NUM": "1", "POLYREME_HEARTBEAT": "0.2", "POLYREME_RESTART_BACKOFF": "0.1"}
        words = [sys.executable, "-m", "polyreme.distributed.launch", *flags, str(write(folder, STEPS)), str(steps)]
        environment = {**os.environ, **quick, "POLYREME_INIT_TIMEOUT": "30", **variables}
        with (folder / "output").open("w") as output:
            self.process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output)

    def finish(self) -> int:
        try:
            return self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs for more than {LIMIT} s; it said:\n{self.said}") from None

    def wait_for_step(self, step: int, rank: int = 0) -> None:
        self.wait_until(lambda: (self.folder / f"met.{step}.{rank}.0").exists())

    def wait_until(self, condition) -> None:
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end, self.said
            time.sleep(0.05)

    @property
    def said(self) -> str:
        logs = [self.folder / "output", *(self.folder / "log").glob("slurm-*.out")]
        return "\n".join(path.read_text() for path in logs)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    if missing_programs():
        pytest.skip(f"not installed: {', '.join(missing_programs())} (Debian: slurm-wlm, munge)")
    if os.geteuid():
        pytest.skip("SLURM's daemons are started by root")
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()


@pytest.mark.slow
@pytest.mark.process
def test_slurm_runs_a_job_names_who_failed_and_runs_it_again(slurm, tmp_path):
    flags = ["--on", "slurm", "--nnodes", "2"]
    failing = ScheduledJob(
        tmp_path / "a", [*flags, "--wait", "--max_restart", "1"], 9, FAULTS="rank1:data:raise@3", **slurm.environment
    )
    assert failing.finish() == 70, failing.said
    assert "rank 1 failed first, on host " in failing.said
    assert "attempt 1: ranks 2, nodes 2" in failing.said
    stopped = ScheduledJob(tmp_path / "b", flags, 2000, **slurm.environment)
    assert stopped.finish() == 0
    number = stopped.said.split("Submitted batch job ")[1].split()[0]
    stopped.wait_for_step(2)
    slurm.run("scancel", "--signal=TERM", number)
    stopped.wait_until(lambda: "Restarts=1" in slurm.run("scontrol", "show", "job", number))
    steps = {(tmp_path / f"b/log/workerlog.{rank}").read_text().split("stopped after step ")[1] for rank in range(2)}
    assert len(steps) == 1
    assert "stopped on request, state saved (exit code 75)" in stopped.said
    slurm.run("scancel", number)


@pytest.mark.slow
@pytest.mark.process
def test_slurm_loses_a_node_and_the_job_goes_on(slurm, tmp_path):
    for text in ("gpu[08-10,12]", "rack[1-2]n[1-2]", "a,b[1-3],c"):
        assert slurm.run("scontrol", "show", "hostnames", text).split() == hostnames(text)
    flags = ["--on", "slurm", "--nnodes", "1:2", "--wait", "--elastic_timeout", "3"]
    job = ScheduledJob(tmp_path / "c", flags, 200, **slurm.environment)
    job.wait_for_step(5)
    slurm.lose("n2")
    assert job.finish() == 0, job.said
    assert "rank 1 failed first" in job.said
    assert "attempt 1: ranks 1, nodes 1" in job.said


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("lost", [0, 1])
def test_ray_runs_a_job_and_loses_a_node(lost, tmp_path):
    pytest.importorskip("ray")
    cluster_utils = importlib.import_module("ray.cluster_utils")
    small = {"object_store_memory": 80 << 20}
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        nodes = [cluster.add_node(num_cpus=1, **small) for _ in range(2)]
        flags = ["--on", "ray", "--job_options", f"address={cluster.address}"]
        failing = ScheduledJob(
            tmp_path / "a", [*flags, "--nnodes=2", "--max_restart=1"], 9, FAULTS="rank1:data:raise@3"
        )
        assert failing.finish() == 70, failing.said
        assert "rank 1 failed first, on host " in failing.said
        stopped = ScheduledJob(tmp_path / "b", [*flags, "--nnodes=2"], 2000)
        stopped.wait_for_step(2)
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.finish() == 75, stopped.said
        job = ScheduledJob(tmp_path / "c", [*flags, "--nnodes=1:2", "--elastic_timeout=3"], 200)
        job.wait_for_step(5)
        cluster.remove_node(nodes[lost])
        assert job.finish() == 0, job.said
        assert "is lost" in job.said
        assert "ranks 1, nodes 1" in job.said
    finally:
        with contextlib.suppress(AssertionError):  # of Ray's, where a node is gone already
            cluster.shutdown()
