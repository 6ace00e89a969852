//! A planned fleet of mixfleet's own engine: commands, Compose, Kubernetes.

use super::StartFile;
use super::instances::{
    HOST_DEVICES_MAX, TakeDevices, WorkerDevice, instances, on_machine, own_backend, pool_name, quoted,
    sharing_word,
};
use mixfleet_hal::units::{Bytes, GIB};
use mixfleet_scheduler::cost::{AttnSplit, ModelShape};
use mixfleet_scheduler::plan::market::PlannedPool;
use mixfleet_scheduler::plan::offer::OfferedPart;
use mixfleet_scheduler::plan::tiers::PlannedTiers;
use mixfleet_sim::fleet_file::role_of;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// The workers of Kubernetes that others are made after.
const WORKER: &str = include_str!("worker.yaml");
/// The port of a worker; the devices that a host lends have the following ones.
const PORT: u32 = 7000;

/// A planned fleet of mixfleet's own engine.
pub(super) struct OwnFleet<'a> {
    pub(super) parts: &'a [OfferedPart],
    pub(super) pools: &'a [PlannedPool],
    /// The shape of the model.
    pub(super) shape: ModelShape,
    pub(super) tiers: &'a PlannedTiers,
    /// A description of the plan.
    pub(super) header: String,
    /// The objectives and the policy, as `router` takes them.
    pub(super) router: Vec<String>,
}

/// Devices of hosts that a process uses, its own first.
struct Hosts {
    /// The number of the process's host, and that of the one which devices are taken of.
    here: u32,
    at: u32,
    /// Devices that were taken of the last host, in all and of each backend.
    devices: u32,
    taken: BTreeMap<&'static str, u32>,
    /// The devices lent by hosts other than the first: host, device and port.
    lent: Vec<(u32, String, u32)>,
}

impl Hosts {
    fn new(here: u32) -> Self {
        Hosts { here, at: here, devices: 0, taken: BTreeMap::new(), lent: Vec::new() }
    }

    /// The next devices of a part, as a worker on the first host names them.
    fn take(&mut self, part: &OfferedPart, count: u32) -> Result<Vec<String>, String> {
        (0..count).map(|_| self.take_one(part)).collect()
    }

    fn take_one(&mut self, part: &OfferedPart) -> Result<String, String> {
        if self.devices == HOST_DEVICES_MAX {
            *self = Hosts {
                at: self.at + 1,
                devices: 0,
                taken: BTreeMap::new(),
                ..std::mem::replace(self, Hosts::new(0))
            };
        }
        self.devices += 1;
        let device = on_machine(part, 1, &mut self.taken)?.concat();
        if self.at == self.here {
            return Ok(device);
        }
        let port = PORT + self.devices;
        self.lent.push((self.at, device, port));
        Ok(format!("remote:HOST-{}:{port}", self.at))
    }
}

impl OwnFleet<'_> {
    /// What starts it.
    pub(super) fn files(&self) -> Vec<StartFile> {
        vec![
            ("mixfleet.sh", self.lines()),
            ("compose.yaml", self.compose()),
            ("workers.yaml", self.kubernetes()),
        ]
    }

    /// The pools whose instances are in one process: all if devices run attention for another pool, else each
    /// alone.
    fn processes(&self) -> Vec<&[PlannedPool]> {
        match self.lends() {
            true => vec![self.pools],
            false => self.pools.chunks(1).collect(),
        }
    }

    /// Whether devices that compute prompts attend to a part of what others decode.
    fn lends(&self) -> bool {
        self.pools.iter().any(|pool| self.borrows(pool))
    }

    /// Whether devices of another pool attend to a part of what this one decodes.
    fn borrows(&self, pool: &PlannedPool) -> bool {
        pool.spare.is_some_and(|spare| spare.lender(self.pools).is_some())
    }

    /// The instances of some pools as arguments of a worker, and how their KV is divided.
    fn devices(&self, pools: &[PlannedPool], take: &mut TakeDevices<'_>) -> Result<Vec<String>, String> {
        let mut words = Vec::new();
        for (pool, instances) in pools.iter().zip(instances(self.parts, pools, take)?) {
            for WorkerDevice { selector, usd_per_hour, .. } in instances {
                let role = role_of(pool.duty);
                words.extend(["--device".into(), format!("{selector}={role}")]);
                words.extend(["--usd-per-hour".into(), format!("{selector}={usd_per_hour}")]);
            }
        }
        let mut splits = pools.iter().filter_map(|pool| self.split(pool));
        if let Some(split) = splits.find(|split| *split != AttnSplit::default()) {
            words.extend(["--attn-split".into(), split.name().into()]);
        }
        Ok(words)
    }

    /// How devices that attend for one of a pool divide its KV, as the plan counts it.
    fn split(&self, pool: &PlannedPool) -> Option<AttnSplit> {
        let apart = pool.attends.map(|others| AttnSplit::even(&self.shape, others.devices));
        apart.or_else(|| self.borrows(pool).then_some(AttnSplit::Request))
    }

    /// A worker's arguments for the tiers of some pools, with disks in `directory`.
    fn tier_flags(&self, pools: &[PlannedPool], directory: &str) -> Vec<String> {
        match pools.iter().any(|pool| self.tiers.are_of(pool)) {
            true => self.tier_words(directory),
            false => Vec::new(),
        }
    }

    fn tier_words(&self, directory: &str) -> Vec<String> {
        let gib = |bytes: Bytes| (bytes.0 / GIB as f64).to_string();
        let dram = vec!["--kv-dram".into(), gib(self.tiers.dram)];
        let ssd = ["--kv-ssd".into(), directory.into(), "--kv-ssd-gib".into(), gib(self.tiers.ssd)];
        let with_ssd = self.tiers.ssd.0 > 0.0;
        dram.into_iter().chain(ssd.into_iter().filter(|_| with_ssd)).collect()
    }

    /// The commands of all processes, on as many hosts as they take.
    ///
    /// # Errors
    /// What no backend drives, or the engine does not run.
    pub(super) fn lines(&self) -> Result<String, String> {
        let mut text = format!(
            "# {}\n\
             # MODEL is the checkpoint's directory, ETCD the address of etcd, and HOST-1 and so on are the hosts. Between\n\
             # hosts each command also takes --tls-ca, --tls-cert and --tls-key (docs/how-to/run-a-fleet.md).\n\
             \nmixfleet router --etcd \"$ETCD\" --model \"$MODEL\" {}\n",
            self.header,
            line(&self.router)
        );
        let mut host = 0;
        let directory = |host: u32| format!("kv-{host}");
        for pools in self.processes() {
            let lone = |pool: &PlannedPool| vec![PlannedPool { count: 1, ..pool.clone() }];
            // a process for each instance, or one for all that share devices
            let (process, times) = match pools {
                [pool] => (lone(pool), pool.count),
                all => (all.to_vec(), 1),
            };
            for _ in 0..times {
                host += 1;
                let mut hosts = Hosts::new(host);
                let words =
                    self.devices(&process, &mut |part, count| hosts.take(&self.parts[part], count))?;
                let tiers = self.tier_flags(&process, &directory(host));
                let names: Vec<String> = process.iter().map(|pool| pool_name(self.parts, pool)).collect();
                let _ = writeln!(text, "\n# {}", names.join(", "));
                for (lender, device, port) in &hosts.lent {
                    let _ = writeln!(text, "mixfleet member --device {device} --listen HOST-{lender}:{port}");
                }
                let _ = writeln!(
                    text,
                    "mixfleet worker --etcd \"$ETCD\" --model \"$MODEL\" --listen-control HOST-{host}:{PORT} {}",
                    line(&[words, tiers].concat())
                );
                host = hosts.at;
            }
        }
        for _ in 0..self.tiers.nodes {
            host += 1;
            let usd = format!("kv={}", self.tiers.usd_per_hour.0);
            let words = [self.tier_words(&directory(host)), vec!["--usd-per-hour".into(), usd]].concat();
            let _ = writeln!(
                text,
                "\nmixfleet worker --etcd \"$ETCD\" --model \"$MODEL\" --listen-control HOST-{host}:{PORT} --role kv {}",
                line(&words)
            );
        }
        Ok(text)
    }

    /// Why no machine, and no pod, has an instance.
    fn fault(&self) -> Result<(), String> {
        if self.tiers.nodes > 0 {
            return Err("KV nodes are hosts of their own".into());
        }
        for pool in self.pools {
            let devices: u32 = pool.takes().map(|(_, devices)| devices).sum();
            if devices > HOST_DEVICES_MAX {
                return Err(format!("an instance has {devices} devices, in several hosts"));
            }
        }
        Ok(())
    }

    /// A deployment for each pool, with a pod for each instance.
    ///
    /// # Errors
    /// Parts of the plan that pods cannot run.
    #[expect(clippy::too_many_lines, reason = "one document, written out")]
    pub(super) fn kubernetes(&self) -> Result<String, String> {
        self.fault()?;
        if self.lends() {
            return Err(
                "devices that compute prompts attend for others of their process, and a pod has one instance"
                    .into(),
            );
        }
        if self.tiers.ssd.0 > 0.0 {
            return Err(
                "where its disks are mounted is the cluster's; give each worker --kv-ssd and --kv-ssd-gib"
                    .into(),
            );
        }
        let template = WORKER.split("---\n").next().unwrap_or_default();
        let mut text = format!("# {}\n", self.header);
        text.push_str(
            "# The router and the rest are those of docs/deploy/kubernetes; start the router with\n",
        );
        let _ = writeln!(text, "#   {}", self.router.join(" "));
        for pool in self.pools {
            let mut parts = pool.takes().map(|(part, _)| part);
            if parts.any(|other| other != pool.part) {
                return Err("a pod's devices are of one part; docs/reference/devices.md explains how mixfleet member lends devices of other hosts".into());
            }
            let (id, role) = (self.parts[pool.part].word(), role_of(pool.duty));
            let (_, resource) = own_backend(&self.parts[pool.part])?;
            // each pod sees its own devices alone, the first as 0
            let (one, mut taken) = ([PlannedPool { count: 1, ..pool.clone() }], BTreeMap::new());
            let words =
                self.devices(&one, &mut |part, count| on_machine(&self.parts[part], count, &mut taken))?;
            let words: String = words[1..].iter().map(|word| format!("            - {word}\n")).collect();
            let devices: u32 = pool.takes().map(|(_, devices)| devices).sum();
            let shared = sharing_word(self.parts, pool);
            let shared = shared.map_or_else(String::new, |word| format!("@mixfleet/devices: {word}\n"));
            let quoted = self
                .tier_flags(std::slice::from_ref(pool), "/shared/kv")
                .into_iter()
                .map(|word| format!("            - \"{word}\"\n"));
            let tiers: String = quoted.collect();
            let changes = [
                ("kind: DaemonSet", "kind: Deployment".to_owned()),
                ("spec:\n  selector:", format!("spec:\n  replicas: {}\n  selector:", pool.count)),
                ("  updateStrategy:", "  strategy:".into()),
                ("      maxUnavailable: 1\n", "      maxUnavailable: 1\n      maxSurge: 0\n".into()),
                ("mixfleet-prefill", format!("mixfleet-{}", pool_name(self.parts, pool))),
                ("component: prefill\n", format!("component: {role}\n@mixfleet/part: {id}\n{shared}")),
                ("mixfleet/prefill: \"true\"", format!("mixfleet/part: {id}")),
                ("            - cuda\n", words),
                (
                    "            - prefill\n            - --kv-memory\n            - \"40\"\n",
                    format!("            - {role}\n{tiers}"),
                ),
                ("nvidia.com/gpu: \"1\"", format!("nvidia.com/gpu: \"{devices}\"")),
                ("nvidia.com/gpu", resource.into()),
            ];
            let mut worker = template.to_owned();
            for (from, to) in changes {
                if !worker.contains(from) {
                    return Err(format!("the worker of docs/deploy/kubernetes has no '{from}'"));
                }
                worker = worker.replace(from, &to);
            }
            // a label that was added stands as deep as the one before it
            let mut indent = 0;
            text.push_str("---\n");
            for line in worker.lines() {
                let label = line.strip_prefix('@');
                indent = if label.is_some() { indent } else { line.len() - line.trim_start().len() };
                let _ =
                    writeln!(text, "{}{}", " ".repeat(label.map_or(0, |_| indent)), label.unwrap_or(line));
            }
        }
        Ok(text)
    }

    /// All instances on one machine, after docs/deploy/compose.yaml.
    ///
    /// # Errors
    /// Why one machine cannot have them.
    pub(super) fn compose(&self) -> Result<String, String> {
        self.fault()?;
        let parts = self.parts;
        let places: BTreeSet<&str> = self
            .pools
            .iter()
            .flat_map(PlannedPool::takes)
            .map(|(part, _)| parts[part].region.as_str())
            .collect();
        if places.len() > 1 {
            return Err("its instances are in several regions, and machines do not span regions".into());
        }
        let mut text = format!("# {}\n", self.header);
        text.push_str(
            "# All on one machine, whose devices are numbered in the order of the pools ('mixfleet devices' lists them):\n\
             #   MODEL=/path/to/checkpoint API_KEY=secret docker compose -f compose.yaml up\n\
             # The image is that of docs/deploy/Dockerfile.\n\
             name: mixfleet\n\nx-mixfleet: &mixfleet\n  image: mixfleet\n  network_mode: service:etcd\n  depends_on: [etcd]\n  \
             restart: unless-stopped\n  environment:\n    XDG_CACHE_HOME: /shared\n  volumes:\n    \
             - ${MODEL:?the checkpoint's directory}:/model:ro\n    - shared:/shared\n\nservices:\n  etcd:\n    \
             image: quay.io/coreos/etcd:v3.6.5\n    restart: unless-stopped\n    command:\n      - etcd\n      \
             - --data-dir=/etcd-data\n      - --listen-client-urls=http://127.0.0.1:2379\n      \
             - --advertise-client-urls=http://127.0.0.1:2379\n    volumes:\n      - etcd:/etcd-data\n    ports:\n      \
             - \"127.0.0.1:8000:8000\"\n",
        );
        let mut service = |name: &str, more: &str, words: &[String]| {
            let _ = write!(text, "\n  {name}:\n    <<: *mixfleet\n{more}    command:\n");
            words.iter().for_each(|word| {
                // in quotes, since Compose does not accept a number as a string
                let _ = writeln!(text, "      - {}", serde_json::json!(word));
            });
        };
        let common = |name: &str| {
            let words = [name, "--etcd", "http://127.0.0.1:2379", "--model", "/model"];
            words.map(String::from).to_vec()
        };
        let router = [common("router"), self.router.clone(), vec!["--listen".into(), "0.0.0.0:8000".into()]];
        let key = "    environment:\n      XDG_CACHE_HOME: /shared\n      MIXFLEET_API_KEY: ${API_KEY:?clients send it}\n    \
                   stop_grace_period: 2m\n";
        service("router", key, &router.concat());
        let mut taken = BTreeMap::new();
        for (at, pools) in (0..).zip(self.processes()) {
            let mut words = common("worker");
            words.extend(self.tier_flags(pools, "/shared/kv"));
            words
                .extend(self.devices(pools, &mut |part, count| on_machine(&parts[part], count, &mut taken))?);
            words.extend(["--listen-http".into(), format!("127.0.0.1:{}", 9000 + at)]);
            let used = pools.iter().flat_map(PlannedPool::takes).map(|(part, _)| own_backend(&parts[part]));
            let backends: BTreeSet<&str> = used.filter_map(|known| Some(known.ok()?.0)).collect();
            let mut more = String::new();
            for (of, lines) in [("cuda", "    gpus: all\n"), ("wgpu", "    devices:\n      - /dev/dri\n")] {
                more.push_str(if backends.contains(of) { lines } else { "" });
            }
            let names: Vec<String> = pools.iter().map(|pool| pool_name(parts, pool)).collect();
            service(&names.join("-"), &more, &words);
        }
        text.push_str("\nvolumes:\n  etcd:\n  shared:\n");
        Ok(text)
    }
}

/// Arguments of a command, quoted for a shell.
fn line(words: &[String]) -> String {
    words.iter().map(|word| quoted(word)).collect::<Vec<_>>().join(" ")
}
