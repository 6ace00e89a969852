"""Holds docs/deploy against published schemas: see ../deploy.sh."""

import copy
import json
import sys
from pathlib import Path

import jsonschema
import kubernetes_validate
import yaml

VERSION = "1.37"
DEPLOY = Path("docs/deploy")
COMPOSE = "check_jsonschema/builtin_schemas/vendor/compose-spec.json"


def kubernetes_fault(document):
    """The faults of a resource."""
    try:
        kubernetes_validate.validate(document, VERSION, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        return f"Kubernetes {VERSION} has no {document.get('kind')} in {document.get('apiVersion')}"
    except (kubernetes_validate.ValidationError, kubernetes_validate.InvalidSchemaError) as error:
        return str(error).splitlines()[0]
    return reference_fault(document)


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


def compose_fault(document, schema):
    errors = list(jsonschema.Draft202012Validator(schema).iter_errors(document))
    return f"{errors[0].json_path}: {errors[0].message[:200]}" if errors else None


def planted(resources, compose, schema):
    """Mistakes, each with what the check says of it."""
    deployment = next(r for r in resources if r["kind"] == "Deployment")

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
        ("a selector of nothing", lambda d: d["spec"]["template"]["metadata"]["labels"].pop("app.kubernetes.io/name")),
    ):
        yield what, kubernetes_fault(spoiled(change, deployment))
    yield "an unknown field of a service", compose_fault(spoiled(lambda d: d["services"]["router"].update(prots=[]), compose), schema)


def main():
    schema = json.loads((Path(sys.argv[1]) / COMPOSE).read_text())
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    resources = {path: [d for d in yaml.safe_load_all(path.read_text()) if d] for path in files}
    compose_file = DEPLOY / "compose.yaml"
    compose = yaml.safe_load(compose_file.read_text())
    failed = 0
    for what, fault in planted([r for found in resources.values() for r in found], compose, schema):
        print(f"planted: {what}: {fault or 'NOT FOUND'}")
        failed += fault is None
    checks = [(path, f"{r.get('kind')} {r['metadata']['name']}", kubernetes_fault(r)) for path, found in resources.items() for r in found]
    checks.append((compose_file, "services " + ", ".join(compose["services"]), compose_fault(compose, schema)))
    for path, what, fault in checks:
        print(f"{path}: {what}: {fault or 'ok'}")
        failed += fault is not None
    if not files:
        print(f"no files below {DEPLOY}")
        failed += 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
