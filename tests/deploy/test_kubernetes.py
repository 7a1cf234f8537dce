"""The Kubernetes manifests: valid for the API server, and in step with what router and engines really do."""

from __future__ import annotations

import shutil
import subprocess
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from deployed import BASE, DEPLOY, VARIABLES, commands_in, documents, parse
from typer.testing import CliRunner

from bidikv_server.cli.app import app
from bidikv_server.router.app import create_app
from bidikv_server.router.settings import RouterSettings

KUBERNETES = DEPLOY / "kubernetes"
KUSTOMIZATIONS = sorted(KUBERNETES.rglob("kustomization.yaml"))
FOREIGN = {"ServiceMonitor"}
"""Kinds of an operator, of which Kubernetes has no schema."""
MANIFESTS = [
    (f"{path.relative_to(KUBERNETES)}:{document['kind']}/{document['metadata']['name']}", document)
    for path in sorted(KUBERNETES.rglob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in documents(path)
]
ENGINE_PORTS = {
    "prefill": {"http": 8100, "nixl": 5600},
    "decode": {"http": 8200, "nixl": 5700, "index": 6900},
}
PART_OF = {"app.kubernetes.io/part-of": "bidikv"}
DNS_CACHE_S = 30
"""How long a cluster's DNS may go on naming a pod that has ended."""


def one(kind: str, name: str) -> dict[str, Any]:
    (found,) = [
        document
        for _, document in MANIFESTS
        if (document["kind"], document["metadata"]["name"]) == (kind, name)
    ]
    return found


WORKLOADS = {
    "router": one("Deployment", "bidikv-router"),
    "prefill": one("Deployment", "bidikv-prefill"),
    "decode": one("StatefulSet", "bidikv-decode"),
}


def pod(workload: str) -> dict[str, Any]:
    spec: dict[str, Any] = WORKLOADS[workload]["spec"]["template"]["spec"]
    return spec


def container(workload: str) -> dict[str, Any]:
    (only,) = pod(workload)["containers"]
    return only


def router_settings(no_variables, keys_file) -> RouterSettings:
    """What the router in its pod would go by."""
    for variable in container("router")["env"]:
        value = (
            str(keys_file) if variable["name"].endswith("_API_KEYS_FILE") else variable.get("value", "hush")
        )
        no_variables.setenv(variable["name"], value)
    config = parse(container("router")["args"])["config"]
    (mount,) = [m for m in container("router")["volumeMounts"] if m["name"] == "config"]
    return RouterSettings.load(BASE / config.relative_to(mount["mountPath"]))


@pytest.mark.parametrize("version", ["1.31", kubernetes_validate.latest_version()])
@pytest.mark.parametrize(("where", "manifest"), MANIFESTS, ids=[where for where, _ in MANIFESTS])
def test_manifests_are_valid(where, manifest, version):
    """By Kubernetes' own schemas, with no field that it does not know."""
    if manifest["kind"] in FOREIGN:
        assert manifest["apiVersion"] == "monitoring.coreos.com/v1"
    else:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(
    "path", KUSTOMIZATIONS, ids=[str(path.relative_to(KUBERNETES)) for path in KUSTOMIZATIONS]
)
def test_kustomizations_name_what_is_there(path):
    """Every resource, component and file exists, and every manifest beside it is used."""
    (content,) = documents(path)
    generated = [file for map_ in content.get("configMapGenerator", []) for file in map_.get("files", [])]
    named = [*content.get("resources", []), *content.get("components", []), *generated]
    assert [name for name in named if not (path.parent / name).exists()] == []
    unused = {file.name for file in path.parent.glob("*.yaml")} - {path.name, "secret.example.yaml", *named}
    assert unused == set()


def selectors(document: dict[str, Any]) -> list[dict[str, str]]:
    """The labels of pods of this namespace that a service, a budget or a policy asks for."""
    spec = document.get("spec", {})
    match document["kind"]:
        case "Service":
            return [spec["selector"]]
        case "PodDisruptionBudget":
            return [spec["selector"]["matchLabels"]]
        case "NetworkPolicy":
            rules = [*spec.get("ingress", []), *spec.get("egress", [])]
            peers = [peer for rule in rules for peer in (*rule.get("from", []), *rule.get("to", []))]
            near = [peer["podSelector"] for peer in peers if "namespaceSelector" not in peer]
            return [selector["matchLabels"] for selector in (spec["podSelector"], *near)]
    return []


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("folder", ["base", "overlays/example"])
def test_kustomize_builds(folder):
    """What comes out is valid too, and no example secret is among it."""
    command = ["kubectl", "kustomize", str(KUBERNETES / folder)]
    built = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    made = [document for document in yaml.safe_load_all(built) if document]
    for document in made:
        if document["kind"] not in FOREIGN:
            kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    assert "Secret" not in {document["kind"] for document in made}
    assert len(made) >= 12
    # Whoever selects pods selects some: a policy that meets none protects nobody.
    pods = [d["spec"]["template"]["metadata"]["labels"] for d in made if "template" in d.get("spec", {})]
    for document in made:
        for wanted in selectors(document):
            assert any(wanted.items() <= labels.items() for labels in pods), document["metadata"]["name"]


def test_the_routers_command_line_and_settings(no_variables, keys_file):
    """The real settings take the file and every variable, and `bidikv router --check` agrees."""
    settings = router_settings(no_variables, keys_file)
    assert settings.admin_key is not None
    assert settings.secret is not None
    assert settings.host == "0.0.0.0"
    checked = CliRunner().invoke(app, ["router", "--config", str(BASE / "router.toml"), "--check"])
    assert checked.exit_code == 0, checked.output
    assert "1 keys of 1 tenants" not in checked.output
    assert "hush" not in checked.output


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_every_variable_is_read_by_somebody(workload):
    """A misspelt one would be ignored by an engine and stop a router."""
    names = {variable["name"] for variable in container(workload)["env"]}
    assert {name for name in names if name.startswith("BIDIKV_")} <= VARIABLES
    assert names - VARIABLES <= {"POD_IP"}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_engines_command_lines(role):
    """The real command line takes them, with the ports that the pod publishes."""
    read = parse(container(role)["args"])
    ports = {port["name"]: port["containerPort"] for port in container(role)["ports"]}
    assert ports == ENGINE_PORTS[role]
    assert (read["port"], read["nixl_port"]) == (ports["http"], ports["nixl"])
    assert read["index_port"] == ports.get("index")
    assert container(role)["args"][:2] == ["engine", role]
    assert read["host"] == "10.0.0.9"
    generated = documents(BASE / "kustomization.yaml")[0]["configMapGenerator"]
    literals = {literal.split("=")[0] for map_ in generated for literal in map_.get("literals", [])}
    assert literals == {"MODEL_PATH", "MODEL_NAME"}


@pytest.mark.parametrize("overlay", ["example"])
def test_overlays_pass_arguments_to_vllm(overlay):
    """What the example adds stands behind `--`."""
    (content,) = documents(KUBERNETES / "overlays" / overlay / "kustomization.yaml")
    (patch,) = content["patches"]
    added = [operation["value"] for operation in yaml.safe_load(patch["patch"])]
    assert added[0] == "--"
    assert parse([*container("decode")["args"], *added])["vllm_args"] == added[1:]
    assert {entry["name"] for entry in content["replicas"]} == {
        f"bidikv-{workload}" for workload in WORKLOADS
    }


def test_the_routers_probes_are_its_endpoints(no_variables, keys_file):
    """Liveness asks nothing of engines, readiness does; the port is the one that it listens on."""
    settings = router_settings(no_variables, keys_file)
    endpoints = create_app(settings)._endpoints
    ports = {port["name"]: port["containerPort"] for port in container("router")["ports"]}
    assert ports == {"http": settings.port}
    probed = {
        name: container("router")[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")
    }
    assert {name: probe["path"] for name, probe in probed.items()} == {
        "startup": "/live", "liveness": "/live", "readiness": "/ready",
    }  # fmt: skip
    assert all("GET" in endpoints[probe["path"]] and probe["port"] == "http" for probe in probed.values())
    (service,) = one("Service", "bidikv-router")["spec"]["ports"]
    assert (service["port"], service["targetPort"]) == (settings.port, "http")
    for _, monitor in MANIFESTS:
        for scraped in monitor["spec"].get("endpoints", []) if monitor["kind"] in FOREIGN else []:
            assert (scraped["port"], scraped["path"]) == ("http", "/metrics")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_the_engines_probes(role):
    """VLLM's own health, on the port of its API."""
    for name in ("startup", "liveness", "readiness"):
        probe = container(role)[f"{name}Probe"]["httpGet"]
        assert probe == {"path": "/health", "port": "http"}


def test_discovery_names_the_headless_services(no_variables, keys_file):
    """The names and ports that the router looks up are those of the services in front of the engines."""
    settings = router_settings(no_variables, keys_file)
    for role, entries in (("prefill", settings.prefill), ("decode", settings.decode)):
        service = one("Service", f"bidikv-{role}")
        assert service["spec"]["clusterIP"] == "None"
        assert entries == (f"dns://{service['metadata']['name']}:{ENGINE_PORTS[role]['http']}",)
        assert service["spec"]["ports"][0]["port"] == ENGINE_PORTS[role]["http"]
    assert WORKLOADS["decode"]["spec"]["serviceName"] == "bidikv-decode"


def test_the_router_has_time_to_stop(no_variables, keys_file):
    """The grace period covers the hook and the router's own grace, with a rest."""
    (wait, seconds) = container("router")["lifecycle"]["preStop"]["exec"]["command"]
    assert wait == "sleep"
    needed_s = int(seconds) + router_settings(no_variables, keys_file).shutdown_grace_s
    assert pod("router")["terminationGracePeriodSeconds"] >= needed_s + 10


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_has_time_to_stop(no_variables, keys_file, role):
    """It waits until routers have noticed, then for its longest answer, and the grace period covers that."""
    *shell, script = container(role)["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == ["sh", "-c"]
    (words,) = commands_in(script)
    read = parse(words)
    settings = router_settings(no_variables, keys_file)
    assert read["url"] == f"http://10.0.0.9:{ENGINE_PORTS[role]['http']}"
    assert read["settle"] >= DNS_CACHE_S + 2 * settings.dns_interval_s
    assert read["timeout"] >= settings.decode_timeout_s
    assert pod(role)["terminationGracePeriodSeconds"] >= read["timeout"] + 30


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_pods_have_no_more_rights_than_they_need(workload):
    """No root, no capabilities, no API token, and no service's variables among the router's settings."""
    assert pod(workload)["enableServiceLinks"] is False
    assert pod(workload)["automountServiceAccountToken"] is False
    security = pod(workload)["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == 10001
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(workload)["securityContext"]["allowPrivilegeEscalation"] is False
    assert container(workload)["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    tags = {image["name"]: image["newTag"] for image in documents(BASE / "kustomization.yaml")[0]["images"]}
    assert tags[container(workload)["image"]] != "latest"


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_secrets_and_maps_exist(workload):
    """Every key that a pod takes is in the Secret's template, every map is generated, every volume is mounted."""
    (secret,) = documents(BASE / "secret.example.yaml")
    generated = {map_["name"] for map_ in documents(BASE / "kustomization.yaml")[0]["configMapGenerator"]}
    taken = [
        v["valueFrom"]["secretKeyRef"]
        for v in container(workload)["env"]
        if "secretKeyRef" in v.get("valueFrom", {})
    ]
    for reference in taken:
        assert reference["name"] == secret["metadata"]["name"]
        assert reference["key"] in secret["stringData"]
    maps = [source["configMapRef"]["name"] for source in container(workload).get("envFrom", [])]
    volumes = pod(workload)["volumes"]
    maps += [volume["configMap"]["name"] for volume in volumes if "configMap" in volume]
    assert set(maps) <= generated
    for volume in volumes:
        if "secret" in volume:
            assert volume["secret"]["secretName"] == secret["metadata"]["name"]
            assert {item["key"] for item in volume["secret"]["items"]} <= set(secret["stringData"])
    assert {volume["name"] for volume in volumes} == {m["name"] for m in container(workload)["volumeMounts"]}


@pytest.mark.parametrize("workload", list(WORKLOADS))
def test_selectors_match(workload):
    """Workload, service and budget mean the same pods."""
    labels = {**WORKLOADS[workload]["spec"]["template"]["metadata"]["labels"], **PART_OF}
    selectors = [
        WORKLOADS[workload]["spec"]["selector"]["matchLabels"],
        one("Service", f"bidikv-{workload}")["spec"]["selector"],
        one("PodDisruptionBudget", f"bidikv-{workload}")["spec"]["selector"]["matchLabels"],
    ]
    for selector in selectors:
        assert selector.items() <= labels.items()
    assert one("PodDisruptionBudget", f"bidikv-{workload}")["spec"]["maxUnavailable"] == 1


def test_the_side_channel_stays_inside():
    """Engines hear the router on their APIs and index, each other on all ports, monitoring on the APIs, nobody else."""
    (content,) = documents(BASE / "kustomization.yaml")
    assert content["labels"][0] == {"pairs": PART_OF, "includeTemplates": True}
    engines = {"app.kubernetes.io/component": "engine", **PART_OF}
    for role in ("prefill", "decode"):
        labels = WORKLOADS[role]["spec"]["template"]["metadata"]["labels"]
        assert engines.items() <= {**labels, **PART_OF}.items()
    assert "app.kubernetes.io/component" not in WORKLOADS["router"]["spec"]["template"]["metadata"]["labels"]
    policies = [
        m
        for _, m in MANIFESTS
        if m["kind"] == "NetworkPolicy" and m["spec"]["podSelector"]["matchLabels"] == engines
    ]
    heard = [rule for policy in policies for rule in policy["spec"]["ingress"]]
    assert all("Ingress" in policy["spec"]["policyTypes"] for policy in policies)
    apis = {ports["http"] for ports in ENGINE_PORTS.values()}
    allowed: dict[str, Any] = {}
    for rule in heard:
        (peer,) = rule["from"]
        ((kind, selector),) = peer.items()
        who = next(iter(selector["matchLabels"].values()))
        allowed[f"{kind} {who}"] = {port["port"] for port in rule["ports"]} if "ports" in rule else "all"
    assert allowed == {
        "podSelector bidikv-router": {*apis, ENGINE_PORTS["decode"]["index"]},
        "podSelector engine": "all",
        "namespaceSelector monitoring": apis,
    }


def test_the_component_of_shared_state():
    """It tells the router of its own service, which only the router may reach."""
    (component,) = documents(KUBERNETES / "components" / "valkey" / "kustomization.yaml")
    (patch,) = component["patches"]
    assert patch["target"] == {"kind": "Deployment", "name": "bidikv-router"}
    operations = yaml.safe_load(patch["patch"])
    assert {(each["op"], each["path"]) for each in operations} == {
        ("add", "/spec/template/spec/containers/0/env/-")
    }
    added = {each["value"]["name"]: each["value"] for each in operations}
    assert added.keys() <= VARIABLES
    state = urlsplit(added["BIDIKV_ROUTER_STATE_URL"]["value"])
    service = one("Service", state.hostname)
    (port,) = service["spec"]["ports"]
    assert (state.scheme, state.port) == ("redis", port["port"])
    pods = one("Deployment", "bidikv-valkey")["spec"]["template"]["metadata"]["labels"]
    # Labels of the base are not put on what a component brings.
    assert pods.items() >= PART_OF.items()
    assert service["spec"]["selector"].items() <= pods.items()
    policy = one("NetworkPolicy", "bidikv-valkey")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pods.items()
    (rule,) = policy["ingress"]
    (peer,) = rule["from"]
    router = WORKLOADS["router"]["spec"]["template"]["metadata"]["labels"]
    assert peer["podSelector"]["matchLabels"].items() <= {**router, **PART_OF}.items()
    assert rule["ports"] == [{"protocol": "TCP", "port": port["port"]}]
    # One password, out of the Secret, for the server, its own check and the routers.
    (server,) = one("Deployment", "bidikv-valkey")["spec"]["template"]["spec"]["containers"]
    (password,) = server["env"]
    assert password["valueFrom"] == added["BIDIKV_ROUTER_STATE_PASSWORD"]["valueFrom"]
    assert f"$({password['name']})" == server["args"][server["args"].index("--requirepass") + 1]
    (secret,) = documents(BASE / "secret.example.yaml")
    assert password["valueFrom"]["secretKeyRef"]["key"] in secret["stringData"]


def test_the_secrets_template_holds_no_secret(keys_file):
    """Its values are placeholders, and its file of keys is one that the router reads."""
    (secret,) = documents(BASE / "secret.example.yaml")
    values = dict(secret["stringData"])
    assert "sha256:" + "0" * 64 in values.pop("keys.toml")
    assert set(values.values()) == {"REPLACE_ME"}
    settings = RouterSettings(prefill=("http://p",), decode=("http://d",), api_keys_file=keys_file)
    assert create_app(settings)._access.counts() == {"team-a": 1}
