"""Kubernetes: a pod a node, of a JobSet or of a plain Indexed Job behind a headless service."""

from __future__ import annotations

import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import yaml

from polyreme.distributed.launch.schedulers.base import NodePlace, Scheduler, Submission, count_of
from polyreme.errors import EXIT_PREEMPTED, EXIT_WATCHDOG, ConfigError

_PORT = 6070
_ROLE = "node"  # of the pods: the name of the JobSet's one replicated job
_AGAIN = (EXIT_PREEMPTED, EXIT_WATCHDOG, 137, 143)
"""Exit codes of a launcher after which its pod is started again: saved and left, lost node 0, killed, ended."""


class Kubernetes(Scheduler):
    """Writes the manifests and hands them to kubectl. A pod that is lost is made again by Kubernetes, and its launcher
    comes to the next attempt; until then the job goes on without it where it may have fewer nodes."""

    name = "k8s"
    takes: tuple[str, ...] = (
        "image",
        "namespace",
        "kind",
        "gpus",
        "cpus",
        "memory",
        "shm",
        "claim",
        "service_account",
        "command",
    )

    def place(self, environment: Mapping[str, str]) -> NodePlace | None:
        index = environment.get("JOB_COMPLETION_INDEX", "")
        if "KUBERNETES_SERVICE_HOST" not in environment or not index.isdigit():
            return None
        return NodePlace(int(index))

    def submit(self, job: Submission) -> int:
        text = yaml.safe_dump_all(manifests(job), sort_keys=False)
        if job.is_dry:
            sys.stdout.write(text)
            return 0
        if job.waits:
            raise ConfigError("launch: --wait: kubectl does that: kubectl wait --for=condition=Complete job/NAME")
        if shutil.which("kubectl") is None:
            raise ConfigError(
                "launch: --on k8s: kubectl is not installed; use --dry_run and apply what it prints elsewhere"
            )
        return subprocess.run(["kubectl", "apply", "-f", "-"], input=text, text=True, check=False).returncode


def manifests(job: Submission) -> list[dict[str, Any]]:
    """The manifests to apply: the secret that the job's processes show each other, and the job.

    That is a JobSet, or with kind=job a headless service and an Indexed Job. Raises ConfigError for a job without an
    image, and for names that Kubernetes does not take.
    """
    settings, name = job.settings, job.name
    if not settings.get("image"):
        raise ConfigError("launch: --on k8s needs --job_options image=IMAGE, with polyreme and your script in it")
    if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        raise ConfigError(f"launch: --job_id {name}: Kubernetes takes at most 40 of a-z, 0-9 and -, a letter first")
    kind = settings.get("kind", "jobset")
    if kind not in ("jobset", "job"):
        raise ConfigError(f"launch: --job_options kind={kind}: give jobset or job")
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "polyreme"}}
    if settings.get("namespace"):
        metadata["namespace"] = settings["namespace"]
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "stringData": {"token": secrets.token_hex(16)},
    }
    # a pod's host name is that of its job and its index, within the domain of the service
    first = f"{name}-{_ROLE}-0-0.{name}" if kind == "jobset" else f"{name}-0.{name}"
    spec = _job_spec(job, f"{first}:{_PORT}")
    if kind == "jobset":
        jobset = {
            "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},  # the job starts its pods again, and the launcher its ranks
            "replicatedJobs": [{"name": _ROLE, "replicas": 1, "template": {"spec": spec}}],
        }
        whole = {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": jobset}
        return [secret, whole]
    spec["template"]["spec"]["subdomain"] = name
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # launchers look for each other before any is ready
            "selector": {"job-name": name},
            "ports": [{"name": "launcher", "port": _PORT}],
        },
    }
    return [secret, service, {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}]


def _job_spec(job: Submission, master: str) -> dict[str, Any]:
    settings = job.settings
    resources: dict[str, Any] = {
        key: settings[name] for key, name in (("cpu", "cpus"), ("memory", "memory")) if settings.get(name)
    }
    if count_of(settings, "gpus"):
        resources["nvidia.com/gpu"] = str(count_of(settings, "gpus"))
    volumes, mounts = _volumes(settings)
    python = settings.get("command", "python")
    container: dict[str, Any] = {
        "name": _ROLE,
        "image": settings["image"],
        "command": job.command("--on", Kubernetes.name, "--master", master, python=python),
        "env": [
            {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "POLYREME_JOB_TOKEN", "valueFrom": {"secretKeyRef": {"name": job.name, "key": "token"}}},
        ],
        "ports": [{"name": "launcher", "containerPort": _PORT}],
        **({"resources": {"limits": resources, "requests": dict(resources)}} if resources else {}),
        **({"volumeMounts": mounts} if mounts else {}),
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",  # a pod that failed is replaced, as podFailurePolicy says
        "terminationGracePeriodSeconds": int(job.grace),
        "containers": [container],
        **({"volumes": volumes} if volumes else {}),
        **({"serviceAccountName": settings["service_account"]} if settings.get("service_account") else {}),
    }
    return {
        "completionMode": "Indexed",
        "completions": job.max_nodes,
        "parallelism": job.max_nodes,
        "backoffLimit": job.max_nodes * max(1, job.max_restart),
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [EXIT_PREEMPTED]}},
                # a setting, a checkpoint or a script that always fails is not mended by another pod
                {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": list(_AGAIN)}},
            ]
        },
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": job.name}}, "spec": pod},
    }


def _volumes(settings: Mapping[str, str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Shared memory for loader workers, and a claim for data, checkpoints and logs: claim=NAME:PATH."""
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    if settings.get("shm"):
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": settings["shm"]}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    if settings.get("claim"):
        claim, _, path = settings["claim"].partition(":")
        if not claim or not path.startswith("/"):
            raise ConfigError(f"launch: --job_options claim={settings['claim']}: give NAME:/PATH")
        volumes.append({"name": "work", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": "work", "mountPath": path})
    return volumes, mounts
