"""Holds docs/deploy against published schemas: see ../deploy.sh."""

import copy
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.37"
DEPLOY = Path("docs/deploy")
# The fields in use of kinds that operators add, as their reference names them: kubernetes-validate has no schema of these.
TEXT, NUMBER = {"type": "string"}, {"type": "number"}


def record(required=(), **fields):
    return {"type": "object", "properties": fields, "required": list(required), "additionalProperties": False}


def list_of(items):
    return {"type": "array", "items": items, "minItems": 1}


LABELS = {"type": "object", "additionalProperties": TEXT}
ADDED = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): record(
        ("selector", "endpoints"), selector=record(matchLabels=LABELS), endpoints=list_of(record(port=TEXT, path=TEXT, interval=TEXT))
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): record(
        ("groups",), groups=list_of(record(("name",), name=TEXT, rules=list_of(record(("record", "expr"), record=TEXT, expr=TEXT))))
    ),
}
# Kinds of other projects, whose schemas no package has.
UNCHECKED = {"DynamoGraphDeployment", "HTTPRoute", "Kustomization", "LLMInferenceService", "LeaderWorkerSet", "PodMonitor", "ScaledObject"}
INFERENCE_POOL = Path("../shared/data/crds/inferencepools-v1.yaml")
# Files that plans wrote, which a test keeps as they are written.
PLANS = Path("runtime/cli/tests/plans")
COMPOSE = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"


def kubernetes_fault(document):
    """The faults of a resource."""
    added = ADDED.get((document.get("apiVersion"), document.get("kind")))
    if added is not None:
        errors = list(jsonschema.Draft202012Validator(record(("spec",), apiVersion=TEXT, kind=TEXT, metadata={}, spec=added)).iter_errors(document))
        return f"{errors[0].json_path}: {errors[0].message[:200]}" if errors else None
    if document.get("kind") == "InferencePool":
        return pool_fault(document)
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return f"Kubernetes {VERSION} has no {document.get('kind')} in {document.get('apiVersion')}"
    except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError) as error:
        return str(error).splitlines()[0]
    return reference_fault(document)


def strict(schema):
    """The schema of a CRD, in which unknown fields are errors."""
    if isinstance(schema, dict):
        schema = {key: strict(value) for key, value in schema.items()}
        if "properties" in schema and schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
    return schema


def pool_fault(document):
    """The faults of an InferencePool, by the CRD."""
    if not INFERENCE_POOL.exists():
        return None
    schema = yaml.safe_load(INFERENCE_POOL.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema = strict(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    return f"{errors[0].json_path}: {errors[0].message[:200]}" if errors else None


def reference_fault(document):
    """What no schema sees: a mount without its volume, a probe's port without a name, a selector that selects nothing."""
    spec = document.get("spec", {})
    pod = spec.get("template", {}).get("spec")
    if pod is None:
        return None
    labels = spec["template"]["metadata"]["labels"]
    if any(labels.get(key) != value for key, value in spec["selector"]["matchLabels"].items()):
        return "the selector does not select the template's labels"
    volumes = {volume["name"] for volume in pod.get("volumes", []) + [t["metadata"] for t in spec.get("volumeClaimTemplates", [])]}
    for container in pod["containers"]:
        missing = {mount["name"] for mount in container.get("volumeMounts", [])} - volumes
        if missing:
            return f"no volume for the mounts {sorted(missing)}"
        ports = {port["name"] for port in container.get("ports", [])}
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            port = container.get(probe, {}).get("httpGet", {}).get("port")
            if port is not None and port not in ports:
                return f"{probe} asks the port '{port}', which is not among {sorted(ports)}"
    return None


def folder_fault(folder, resources):
    """What Kustomize would refuse, or leave out: a file that is not there, or one that is not listed."""
    listed = yaml.safe_load((folder / "kustomization.yaml").read_text())
    unknown = set(listed) - {"apiVersion", "kind", "resources", "images"}
    if unknown or listed.get("kind") != "Kustomization":
        return f"unknown fields {sorted(unknown)}, or not a Kustomization"
    there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    if there != set(listed["resources"]):
        return f"lists {sorted(listed['resources'])}, and has {sorted(there)}"
    found = [resource for path in resources if path.parent == folder for resource in resources[path]]
    services = [r for r in found if r["kind"] == "Service"]
    for monitor in (r for r in found if r["kind"] == "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [s for s in services if wanted <= s["metadata"]["labels"].items()]
        ports = {port["name"] for service in chosen for port in service["spec"]["ports"]}
        if len(chosen) != 1 or {e["port"] for e in monitor["spec"]["endpoints"]} - ports:
            return f"the monitor selects {len(chosen)} services, with the ports {sorted(ports)}"
    recorded = {rule["record"] for r in found if r["kind"] == "PrometheusRule" for g in r["spec"]["groups"] for rule in g["rules"]}
    for scaler in (r for r in found if r["kind"] == "HorizontalPodAutoscaler"):
        missing = {metric["external"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} - recorded
        if missing:
            return f"no rule records {sorted(missing)}"
    return None


def compose_fault(document, schema):
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    return f"{errors[0].json_path}: {errors[0].message[:200]}" if errors else None


def router_fault(load, path):
    """The faults of a configuration of Dynamo's global router, by its own loader."""
    try:
        config = load(path)
    except (KeyError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    strategy = config.prefill_pool_selection_strategy or config.agg_pool_selection_strategy
    return None if strategy.select_pool(ttft_target_ms=500, **({"isl": 1000} if config.mode == "disagg" else {})) >= 0 else "no pool"


def dynamo_loader(packages):
    """The loader of the package ai-dynamo, without what its package imports."""
    path = Path(packages) / "dynamo/global_router/pool_selection.py"
    spec = importlib.util.spec_from_file_location("pool_selection", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["pool_selection"] = module
    spec.loader.exec_module(module)
    return module.load_config


def planted(resources, compose, schema):
    """Mistakes, each with what the check says of it."""
    deployment = next(r for r in resources if r["kind"] == "Deployment" and r["metadata"]["name"] == "mixfleet-router")
    monitor = next(r for r in resources if r["kind"] == "ServiceMonitor")

    def spoiled(change, document):
        document = copy.deepcopy(document)
        change(document)
        return document

    def container(document):
        return document["spec"]["template"]["spec"]["containers"][0]

    for what, change in (
        ("an unknown field", lambda d: d["spec"].update(replica=2)),
        ("an unknown field deep inside", lambda d: container(d)["livenessProbe"]["httpGet"].update(prot=1)),
        ("a wrong type", lambda d: d["spec"].update(replicas="two")),
        ("a missing field", lambda d: d["spec"].pop("selector")),
        ("a kind that is not", lambda d: d.update(kind="Deploymint")),
        ("a mount without a volume", lambda d: container(d)["volumeMounts"][0].update(name="gone")),
        ("a probe of no port", lambda d: container(d)["readinessProbe"]["httpGet"].update(port="web")),
        ("a pool without ports", lambda d: d.clear() or d.update(kind="InferencePool", spec={"selector": {"matchLabels": {"a": "b"}}})),
        ("a selector of nothing", lambda d: d["spec"]["template"]["metadata"]["labels"].pop("app.kubernetes.io/name")),
    ):
        yield what, kubernetes_fault(spoiled(change, deployment))
    yield "an unknown field of a monitor", kubernetes_fault(spoiled(lambda d: d["spec"]["endpoints"][0].update(prot=1), monitor))
    yield "an unknown field of a service", compose_fault(spoiled(lambda d: d["services"]["router"].update(prots=[]), compose), schema)


def main():
    schema = json.loads((Path(sys.argv[1]) / COMPOSE).read_text())
    files = sorted(path for path in (DEPLOY / "kubernetes").rglob("*.yaml") if path.name != "kustomization.yaml")
    files += sorted(PLANS.rglob("*.yaml"))
    resources = {path: [d for d in yaml.safe_load_all(path.read_text()) if d and "kind" in d] for path in files}
    compose_file = DEPLOY / "compose.yaml"
    compose = yaml.safe_load(compose_file.read_text())
    failed = 0
    for what, fault in planted([r for found in resources.values() for r in found], compose, schema):
        print(f"planted: {what}: {fault or 'NOT FOUND'}")
        failed += fault is None
    checks = []
    for path, found in resources.items():
        for r in found:
            what = f"{r['kind']} {r.get('metadata', {}).get('name', '')}"
            if r["kind"] in UNCHECKED:
                print(f"{path}: {what}: schema not checked")
            else:
                checks.append((path, what, kubernetes_fault(r)))
    checks.append((compose_file, "services " + ", ".join(compose["services"]), compose_fault(compose, schema)))
    folders = sorted(path.parent for path in (DEPLOY / "kubernetes").rglob("kustomization.yaml"))
    checks.extend((folder, "Kustomization", folder_fault(folder, resources)) for folder in folders)
    for path, what, fault in checks:
        print(f"{path}: {what}: {fault or 'ok'}")
        failed += fault is not None
    load = dynamo_loader(sys.argv[1])
    grids = sorted(PLANS.rglob("global-router.json"))
    for path in grids:
        fault = router_fault(load, path)
        print(f"{path}: Dynamo's global router: {fault or 'ok'}")
        failed += fault is not None
    if not grids:
        sys.exit(f"no grids below {PLANS}")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as spoiled:
        spoiled.write(grids[0].read_text().replace('"prefill_pool_mapping": [', '"prefill_pool_mapping": [[0],', 1))
        spoiled.flush()
        fault = router_fault(load, spoiled.name)
    print(f"planted: a row too many in a grid: {fault or 'NOT FOUND'}")
    failed += fault is None
    if not files:
        print(f"no files below {DEPLOY}")
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
