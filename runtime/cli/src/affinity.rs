//! Where this process's devices are on the machine, and threads that run near them.

use crate::remote;
use mixfleet_cpu::host;
#[cfg(all(feature = "fleet", feature = "verbs", target_os = "linux"))]
use mixfleet_discover::RdmaChoice;
use mixfleet_discover::{CpuList, ServedDevice, ThreadHome, Topology, Tree};
use mixfleet_hal::cast::{to_u32, to_usize};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Device, DeviceInfo};
use mixfleet_runtime::engine::Loaded;
use mixfleet_runtime::env::{Env, Listener, SharedEnv, Task};
use mixfleet_scheduler::cost::CostModel;
use std::collections::BTreeMap;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

/// The devices of this process, with the topology of the machine.
pub(crate) struct LocatedDevices {
    topology: Topology,
    /// The devices of each instance, behind the instance's id.
    instances: Vec<(String, Vec<ServedDevice>)>,
}

impl LocatedDevices {
    /// Locates the devices of `instances`.
    pub(crate) fn of(instances: &[(Loaded, CostModel)]) -> Self {
        let topology = Topology::read(&Tree::at("/"));
        let located = |device: &Arc<dyn Device>| located(&topology, device.info());
        let of_one = |(loaded, _): &(Loaded, _)| (loaded.id(), loaded.devices().map(located).collect());
        let instances = instances.iter().map(of_one).collect();
        LocatedDevices { topology, instances }
    }

    /// Locates a device lent to other processes.
    #[cfg(feature = "fleet")]
    pub(crate) fn of_device(device: &dyn Device) -> Self {
        let topology = Topology::read(&Tree::at("/"));
        let info = device.info();
        let instances = vec![(info.id.clone(), vec![located(&topology, info)])];
        LocatedDevices { topology, instances }
    }

    #[cfg(feature = "fleet")]
    fn all(&self) -> Vec<ServedDevice> {
        self.instances.iter().flat_map(|(_, devices)| devices.iter().cloned()).collect()
    }

    /// The RDMA devices nearest to this process's devices.
    #[cfg(all(feature = "fleet", feature = "verbs", target_os = "linux"))]
    pub(crate) fn rdma(&self) -> RdmaChoice {
        self.topology.rdma_near(&self.all())
    }

    /// Returns an environment that binds the thread of each instance to the NUMA nodes of its devices; `env`
    /// itself if there is nothing to bind.
    pub(crate) fn bind_instances(&self, env: &SharedEnv) -> SharedEnv {
        let homes = self.instances.iter().filter_map(|(id, devices)| {
            let cpus = self.cpus_near(&format!("the thread of {id}"), devices)?;
            Some((instance_thread(id), cpus))
        });
        let homes: BTreeMap<String, CpuList> = homes.collect();
        match homes.is_empty() {
            true => env.clone(),
            false => Arc::new(NumaEnv { inner: env.clone(), homes }),
        }
    }

    /// Runs `work` on a thread that is bound to the NUMA nodes of all devices, so that the threads which
    /// `work` starts are bound too; on the calling thread if there is nothing to bind.
    #[cfg(feature = "fleet")]
    pub(crate) fn start_near<T: Send>(&self, what: &str, work: impl FnOnce() -> T + Send) -> io::Result<T> {
        let Some(cpus) = self.cpus_near(what, &self.all()) else { return Ok(work()) };
        std::thread::scope(|scope| {
            let bound = move || {
                bind(&cpus);
                work()
            };
            let thread = std::thread::Builder::new().name("near devices".into());
            let thread = thread.spawn_scoped(scope, bound).map_err(|error| {
                io::Error::new(error.kind(), format!("no thread is left ({error}); --no-pin needs none"))
            })?;
            Ok(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// The CPUs to which threads of `devices` are bound, which is logged.
    fn cpus_near(&self, threads: &str, devices: &[ServedDevice]) -> Option<CpuList> {
        let allowed = CpuList::new(host::allowed_cpus().into_iter().map(to_u32).collect());
        match self.topology.thread_home(devices, &allowed) {
            ThreadHome::Nodes { nodes, cpus } => {
                tracing::info!(threads, numa_nodes = ?nodes, %cpus, "bound to the NUMA nodes of devices (see --no-pin)");
                Some(cpus)
            }
            ThreadHome::Anywhere(reason) => {
                tracing::debug!(threads, reason, "not bound to a NUMA node");
                None
            }
        }
    }
}

/// A device by its place on this machine. A device lent by another process may be in another machine, whose
/// addresses mean nothing here.
fn located(topology: &Topology, info: &DeviceInfo) -> ServedDevice {
    let is_lent = info.id.starts_with(remote::PREFIX);
    let address = if is_lent { None } else { topology.address_of(info) };
    ServedDevice { id: info.id.clone(), address }
}

/// The name that the runtime gives to the thread of an instance.
fn instance_thread(id: &str) -> String {
    format!("worker {id}")
}

/// Binds the calling thread; if that is refused, it runs on.
fn bind(cpus: &CpuList) {
    let list: Vec<usize> = cpus.cpus().iter().map(|&cpu| to_usize(cpu)).collect();
    if let Err(error) = host::bind_to(&list) {
        tracing::warn!(%cpus, %error, "a thread cannot be bound and runs on any CPU");
    }
}

/// A future as an environment takes and returns it.
type Boxed<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// An environment in which threads of some names are bound to CPUs. Threads that these start are bound
/// likewise.
struct NumaEnv {
    inner: SharedEnv,
    /// CPUs by the thread's name.
    homes: BTreeMap<String, CpuList>,
}

impl Env for NumaEnv {
    fn now(&self) -> Seconds {
        self.inner.now()
    }

    fn unix_time(&self) -> Seconds {
        self.inner.unix_time()
    }

    fn sleep(&self, span: Duration) -> Task {
        self.inner.sleep(span)
    }

    fn spawn(&self, task: Task) {
        self.inner.spawn(task);
    }

    fn spawn_worker(&self, name: &str, task: Task) -> io::Result<()> {
        let Some(cpus) = self.homes.get(name).cloned() else { return self.inner.spawn_worker(name, task) };
        let bound = async move {
            // a worker's task runs on the worker's thread alone
            bind(&cpus);
            task.await;
        };
        self.inner.spawn_worker(name, Box::pin(bound))
    }

    fn block_on(&self, done: Boxed<'_, ()>, limit: Duration) -> bool {
        self.inner.block_on(done, limit)
    }

    fn random(&self) -> u64 {
        self.inner.random()
    }

    fn listen(&self, address: &str) -> Boxed<'static, io::Result<Box<dyn Listener>>> {
        self.inner.listen(address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mixfleet_runtime::env::RealEnv;
    use std::sync::mpsc;

    /// A machine whose first NUMA node has the first CPU of this process and a GPU, the second one the rest.
    fn machine() -> Option<(Topology, CpuList, CpuList)> {
        let allowed: Vec<u32> = host::allowed_cpus().into_iter().map(to_u32).collect();
        let (first, rest) = allowed.split_at(1);
        if rest.is_empty() {
            return None;
        }
        let recording = r#"{"schema": "mixfleet.machine/1", "files": {
            "sys/bus/pci/devices/0000:01:00.0/class": "0x030200",
            "sys/bus/pci/devices/0000:01:00.0/vendor": "0x10de",
            "sys/bus/pci/devices/0000:01:00.0/device": "0x2330",
            "sys/bus/pci/devices/0000:01:00.0/numa_node": "0",
            "sys/devices/system/node/node0/cpulist": "FIRST",
            "sys/devices/system/node/node1/cpulist": "REST"
        }, "lists": {
            "sys/bus/pci/devices": ["0000:01:00.0"],
            "sys/devices/system/node": ["node0", "node1"]
        }}"#;
        let (first, rest) = (CpuList::new(first.to_vec()), CpuList::new(rest.to_vec()));
        let recording = recording.replace("FIRST", &first.to_string()).replace("REST", &rest.to_string());
        let tree = Tree::recorded(serde_json::from_str(&recording).unwrap()).unwrap();
        Some((Topology::read(&tree), first, rest))
    }

    fn device(id: &str, notes: &[(&str, &str)]) -> DeviceInfo {
        DeviceInfo {
            id: id.into(),
            backend: "cuda".into(),
            name: id.into(),
            kind: mixfleet_hal::DeviceKind::Gpu,
            memory: mixfleet_hal::units::Bytes(0.0),
            compute_units: 1,
            fingerprint: id.into(),
            notes: notes.iter().map(|(what, value)| ((*what).into(), (*value).into())).collect(),
        }
    }

    fn allowed_here() -> CpuList {
        CpuList::new(host::allowed_cpus().into_iter().map(to_u32).collect())
    }

    #[test]
    fn the_thread_of_an_instance_is_bound_and_no_other_one() {
        let Some((topology, first, _)) = machine() else {
            eprintln!("SKIPPED: this process may use one CPU only");
            return;
        };
        let gpu = located(&topology, &device("cuda:0", &[("pci", "0000:01:00.0")]));
        let cores = ServedDevice { id: "cpu".into(), address: None };
        let instances = vec![("cuda:0".into(), vec![gpu]), ("cpu".into(), vec![cores])];
        let here = LocatedDevices { topology, instances };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let env: SharedEnv = Arc::new(RealEnv::new(runtime.handle().clone()));
        let bound = here.bind_instances(&env);
        let all = allowed_here();
        let cpus_of = |name: &str| {
            let (tell, told) = mpsc::channel();
            let task = async move { tell.send(allowed_here()).unwrap() };
            bound.spawn_worker(name, Box::pin(task)).unwrap();
            told.recv().unwrap()
        };
        assert_eq!(cpus_of(&instance_thread("cuda:0")), first);
        assert_eq!(cpus_of(&instance_thread("cpu")), all);
        assert_eq!(cpus_of("event log"), all);
        assert_eq!(allowed_here(), all, "the thread that starts them is left alone");
    }

    #[cfg(feature = "fleet")]
    #[test]
    fn threads_that_a_transport_starts_are_bound() {
        let Some((topology, first, _)) = machine() else {
            eprintln!("SKIPPED: this process may use one CPU only");
            return;
        };
        let gpu = located(&topology, &device("cuda:0", &[("pci", "0000:01:00.0")]));
        let here = LocatedDevices { topology, instances: vec![("cuda:0".into(), vec![gpu])] };
        let all = allowed_here();
        let started = || std::thread::spawn(allowed_here).join().unwrap();
        assert_eq!(here.start_near("a transport's threads", started).unwrap(), first);
        assert_eq!(allowed_here(), all);
    }

    #[test]
    fn an_address_in_another_machine_is_none_here() {
        let Some((topology, ..)) = machine() else {
            eprintln!("SKIPPED: this process may use one CPU only");
            return;
        };
        let notes = [("pci", "0000:01:00.0"), ("device", "cuda:0")];
        assert_eq!(located(&topology, &device("remote:10.0.0.2:7001", &notes)).address, None);
        assert!(located(&topology, &device("cuda:0", &notes)).address.is_some());
    }
}
