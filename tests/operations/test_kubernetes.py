"""The Kubernetes example keeps the rules that make a native sidecar safe beside a serving engine."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOYMENT, MONITOR = yaml.safe_load_all((ROOT / "configs" / "kubernetes" / "sidecar.yaml").read_text())
POD: dict[str, Any] = DEPLOYMENT["spec"]["template"]["spec"]
(SIDECAR,) = POD["initContainers"]
(ENGINE,) = POD["containers"]


def _mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


def _variables(container: dict[str, Any]) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_is_a_native_sidecar() -> None:
    assert DEPLOYMENT["apiVersion"] == "apps/v1"
    assert DEPLOYMENT["kind"] == "Deployment"
    assert SIDECAR["restartPolicy"] == "Always"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert DEPLOYMENT["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_probes_never_wait_for_an_engine_nor_act_on_findings() -> None:
    assert "readinessProbe" not in SIDECAR
    for probe in ("startupProbe", "livenessProbe"):
        assert SIDECAR[probe]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    liveness = SIDECAR["livenessProbe"]
    assert liveness["periodSeconds"] * liveness["failureThreshold"] >= 60


def test_shares_what_ipc_needs_and_nothing_of_the_host() -> None:
    assert POD["shareProcessNamespace"] is True
    assert not {"hostIPC", "hostPID", "hostNetwork"} & POD.keys()
    assert all("hostPath" not in volume for volume in POD["volumes"])
    for name, path in (("shm", "/dev/shm"), ("canaryd-sockets", "/run/canaryd")):
        assert _mounts(SIDECAR)[name] == _mounts(ENGINE)[name] == path
        (volume,) = (volume for volume in POD["volumes"] if volume["name"] == name)
        assert volume["emptyDir"]["medium"] == "Memory"
    assert _variables(SIDECAR)["CANARYD_SOCKET_DIR"] == _variables(ENGINE)["CANARYD_SOCKET_DIR"]


def test_socket_directory_is_private_and_made_by_the_daemon() -> None:
    place = Path(_variables(SIDECAR)["CANARYD_SOCKET_DIR"])
    assert place.parent == Path(_mounts(SIDECAR)["canaryd-sockets"])


@pytest.mark.parametrize("container", [SIDECAR, ENGINE], ids=["sidecar", "engine"])
def test_least_privilege(container: dict[str, Any]) -> None:
    pod = POD["securityContext"]
    assert pod["runAsNonRoot"] is True
    assert pod["runAsUser"] > 0
    assert pod["seccompProfile"]["type"] == "RuntimeDefault"
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["allowPrivilegeEscalation"] is False
    assert "privileged" not in context
    assert "runAsUser" not in context, "both containers run as the pod's user: the daemon checks its peers"


def test_root_file_system_is_read_only_and_the_image_writes_to_volumes() -> None:
    assert SIDECAR["securityContext"]["readOnlyRootFilesystem"] is True
    dockerfile = (ROOT / "Dockerfile").read_text()
    mounts = set(_mounts(SIDECAR).values())
    for variable in ("CANARYD_STATE_DIR", "TRITON_CACHE_DIR"):
        match = re.search(rf"{variable}=(\S+)", dockerfile)
        assert match is not None
        assert any(Path(match.group(1)).is_relative_to(mount) for mount in mounts), variable
    assert "/tmp" in mounts
    assert set(_mounts(SIDECAR)) == {volume["name"] for volume in POD["volumes"]}


def test_gpu_is_seen_without_a_claim() -> None:
    assert POD["runtimeClassName"] == "nvidia"
    assert _variables(SIDECAR)["NVIDIA_VISIBLE_DEVICES"]
    limits = {**SIDECAR["resources"]["limits"], **SIDECAR["resources"]["requests"]}
    assert not any(name.startswith("nvidia.com/") for name in limits)
    assert ENGINE["resources"]["limits"]["nvidia.com/gpu"] == 1


def test_is_scraped_by_its_pod_under_the_job_that_alerts_select() -> None:
    assert MONITOR["kind"] == "PodMonitor"
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert MONITOR["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (endpoint,) = MONITOR["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in {port["name"] for port in SIDECAR["ports"]}
    assert endpoint["honorLabels"] is False
    assert {"targetLabel": "job", "replacement": "canaryd"} in endpoint["relabelings"]
    ports = {port["containerPort"] for port in SIDECAR["ports"]}
    assert f"EXPOSE {ports.pop()}\n" in (ROOT / "Dockerfile").read_text()
