"""An Envoy in front of model servers: with the picker, or with a policy of its own."""

import json
import pathlib
import subprocess
import tempfile
import time
import urllib.request

KIND = "type.googleapis.com/envoy.extensions."
POLICY = "load_balancing_policies."


def at(address):
    host, port = address.rsplit(":", 1)
    return {"address": {"socket_address": {"address": host, "port_value": int(port)}}}


def policy(name, **settings):
    typed = {"@type": f"{KIND}{POLICY}{name}.v3.{''.join(word.title() for word in name.split('_'))}", **settings}
    return {"policies": [{"typed_extension_config": {"name": f"envoy.{POLICY}{name}", "typed_config": typed}}]}


def cluster(name, addresses, **more):
    endpoints = [{"endpoint": at(address)} for address in addresses]
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}
    limits = {"thresholds": [{"max_connections": 10000, "max_pending_requests": 10000, "max_requests": 10000}]}
    return {"name": name, "type": "STATIC", "connect_timeout": "1s", "load_assignment": assignment,
            "circuit_breakers": limits, **more}


def picked(policy_of_none):
    """The policy that sends a request where the picker says, and tells which endpoint served."""
    key = {"key": "envoy.lb", "path": [{"key": "x-gateway-destination-endpoint-served"}]}
    sources = [{"header": "x-gateway-destination-endpoint"}]
    return policy("override_host", override_host_sources=sources, selected_host_key=key, fallback_policy=policy_of_none)


def processing(subset, allows):
    """The filters that have the picker asked. A subset is a hint that only these endpoints may be picked; `allows` lets
    requests pass while no picker answers."""
    modes = {f"{side}_{part}_mode": "SEND" for side in ("request", "response") for part in ("header", "trailer")}
    modes |= {f"{side}_body_mode": "FULL_DUPLEX_STREAMED" for side in ("request", "response")}
    processor = {
        "@type": KIND + "filters.http.ext_proc.v3.ExternalProcessor",
        "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
        "processing_mode": modes,
        "message_timeout": "10s",
        "failure_mode_allow": allows,
        "metadata_options": {
            "forwarding_namespaces": {"untyped": ["envoy.lb", "envoy.lb.subset_hint"]},
            "receiving_namespaces": {"untyped": ["envoy.lb"]},
        },
    }
    filters = [{"name": "envoy.filters.http.ext_proc", "typed_config": processor}]
    if subset is not None:
        value = {"x-gateway-destination-endpoint-subset": subset}
        hint = {"@type": KIND + "filters.http.set_metadata.v3.Config",
                "metadata": [{"metadata_namespace": "envoy.lb.subset_hint", "value": value}]}
        filters.insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": hint})
    return filters


def listener(name, pool, subset, allows, has_picker):
    retries = {"retry_on": "connect-failure,refused-stream,reset-before-request,5xx", "num_retries": 2}
    route = {"match": {"prefix": "/"}, "route": {"cluster": pool, "timeout": "0s", "retry_policy": retries}}
    router = {"name": "envoy.filters.http.router",
              "typed_config": {"@type": KIND + "filters.http.router.v3.Router"}}
    manager = {
        "@type": KIND + "filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": pool,
        "always_set_request_id_in_response": True,
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": (processing(subset, allows) if has_picker else []) + [router],
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    return {"name": name, "per_connection_buffer_limit_bytes": 1 << 20, **at("127.0.0.1:0"),
            "filter_chains": [{"filters": filters}]}


class Envoy:
    """`fronts` has for each name a policy: picker, ("picker", subset, whether requests pass without it), round_robin or
    least_request.

    Afterwards it has for each name the address; the system chooses the ports. `endpoints` are addresses, or addresses by
    the name of a front.
    """

    def __init__(self, program, fronts, endpoints, picker, health=None, concurrency=1):
        http2 = {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": KIND + "upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}}}}
        clusters = [cluster("picker", [picker], typed_extension_protocol_options=http2)] if picker else []
        for service in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor") if health else ():
            check = {"timeout": "1s", "interval": "0.2s", "no_traffic_interval": "0.2s", "healthy_threshold": 1,
                     "unhealthy_threshold": 1, "grpc_health_check": {"service_name": service}}
            clusters.append(cluster(f"health-{service}", [health], typed_extension_protocol_options=http2,
                                    health_checks=[check]))
        listeners = []
        for name, front in fronts.items():
            kind, subset, allows = (*front, None, False)[:3] if isinstance(front, tuple) else (front, None, False)
            chosen = picked(policy("round_robin")) if kind == "picker" else policy(kind)
            own = endpoints[name] if isinstance(endpoints, dict) else endpoints
            clusters.append(cluster(f"pool-{name}", own, load_balancing_policy=chosen))
            listeners.append(listener(name, f"pool-{name}", subset, allows, kind == "picker"))
        config = {"admin": at("127.0.0.1:0"), "static_resources": {"listeners": listeners, "clusters": clusters}}
        self.directory = tempfile.TemporaryDirectory(prefix="envoy-")
        path = pathlib.Path(self.directory.name) / "envoy.json"
        path.write_text(json.dumps(config))
        command = [program, "-c", str(path), "--use-dynamic-base-id", "--concurrency", str(concurrency), "-l", "warn"]
        admin = path.with_suffix(".admin")
        command += ["--admin-address-path", str(admin)]
        self.log = open(path.with_suffix(".log"), "w")  # noqa: SIM115
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                self.admin = admin.read_text().strip()
                if self.admin and self.ask("ready"):
                    listening = json.loads(self.ask("listeners?format=json"))["listener_statuses"]
                    addresses = {one["name"]: one["local_address"]["socket_address"] for one in listening}
                    self.fronts = {name: f"{of['address']}:{of['port_value']}" for name, of in addresses.items()}
                    return
            except OSError:
                pass
            time.sleep(0.05)
            if self.process.poll() is not None:
                break
        text = path.with_suffix(".log").read_text()
        self.stop()
        raise SystemExit("Envoy does not start:\n" + text)

    def ask(self, path):
        with urllib.request.urlopen(f"http://{self.admin}/{path}", timeout=5) as answer:
            return answer.read().decode()

    def healthy(self):
        """The health services of the picker, and whether Envoy's checks pass."""
        clusters = json.loads(self.ask("clusters?format=json"))["cluster_statuses"]
        failed = lambda one: one["host_statuses"][0]["health_status"].get("failed_active_health_check", False)
        return {one["name"].removeprefix("health-"): not failed(one) for one in clusters if one["name"].startswith("health-")}

    def stop(self):
        self.process.kill()
        self.process.wait()
        self.log.close()
        self.directory.cleanup()
