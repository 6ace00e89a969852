//! Partitions between hosts.

use super::fences::Fences;
use super::{State, World};
use mixfleet_hal::memory::SharedMemory;
use mixfleet_hal::transport::{Descriptor, Endpoint, Piece, RemoteAccess, TransferId, Transport};
use mixfleet_hal::units::Seconds;
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_runtime::env::Env;
use mixfleet_runtime::fleet::registry::sim::Reachability;
use mixfleet_wire::{FaultyTransport, InProcessTransport};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One partition in this many lasts longer than any timeout.
const LASTING_ONE_IN: u64 = 4;
const LASTING_S: f64 = 30.0;

/// Times until which the second host receives nothing from the first.
pub(super) type Deaf = BTreeMap<(String, String), Seconds>;

impl World {
    /// Whether messages of `from` arrive at `to`.
    pub(super) fn hears(&self, from: &str, to: &str) -> bool {
        let state = self.state();
        let deaf = state.deaf.get(&(from.to_owned(), to.to_owned()));
        state.over || deaf.is_none_or(|&until| until <= self.env.now())
    }

    /// Checks both directions, since each transfer needs an acknowledgement.
    fn reaches(&self, here: &str, there: &str) -> Result<()> {
        if self.hears(here, there) && self.hears(there, here) {
            return Ok(());
        }
        self.count("KV that met a partition", 1);
        Err(Error::new(ErrorKind::Timeout, format!("{there} is not heard")))
    }

    /// Cuts a host off from one other, or from all and from the registry; in both directions, or one.
    pub(super) async fn partition(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let hosts = self.state().hosts();
            if hosts.len() < 2 {
                continue;
            }
            let nth = self.below(hosts.len() as u64) as usize;
            let struck = hosts.iter().nth(nth).expect("in range").clone();
            let others: Vec<String> = hosts.into_iter().filter(|host| *host != struck).collect();
            let (whole, one_way) = (self.below(3) == 0, self.below(2) == 0);
            let lasting = self.below(LASTING_ONE_IN) == 0;
            let span = self.span(if lasting { LASTING_S } else { 0.5 });
            let until = self.env.now() + Seconds(span.as_secs_f64());
            let others =
                if whole { others } else { vec![others[self.below(others.len() as u64) as usize].clone()] };
            self.count(if one_way { "partitions one way" } else { "partitions" }, 1);
            if lasting {
                self.count("partitions that last", 1);
            }
            let mut state = self.state();
            for other in others {
                state.deaf.insert((struck.clone(), other.clone()), until);
                if !one_way {
                    state.deaf.insert((other, struck.clone()), until);
                }
            }
            drop(state);
            if whole {
                self.silence_registry(&struck, span);
            }
        }
    }

    /// Lets the registry not answer a host for this time.
    fn silence_registry(&self, host: &str, span: Duration) {
        let Some(client) = self.registry_client(host) else { return };
        client.set_link(Reachability::Silent);
        let world = self.clone();
        self.env.spawn(Box::pin(async move {
            world.env.sleep(span).await;
            client.set_link(Reachability::Up);
        }));
    }
}

impl State {
    fn hosts(&self) -> BTreeSet<String> {
        let workers = self.workers.keys().map(|&number| worker_host(number));
        workers.chain(self.routers.keys().map(|&number| router_host(number))).collect()
    }
}

pub(super) fn worker_host(number: u64) -> String {
    format!("worker{number}")
}

pub(super) fn router_host(number: u64) -> String {
    format!("router{number}")
}

/// A transport for KV that partitions interrupt.
pub(super) struct Parted {
    pub(super) inner: Arc<Fences<FaultyTransport<InProcessTransport>>>,
    pub(super) world: World,
    pub(super) host: String,
}

impl Transport for Parted {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn register(&self, memory: Arc<dyn SharedMemory>, access: RemoteAccess) -> Result<Descriptor> {
        let region = self.inner.register(memory, access)?;
        self.world.state().regions.insert(region.address.clone(), self.host.clone());
        Ok(region)
    }

    fn deregister(&self, region: &Descriptor) -> Result<()> {
        self.inner.deregister(region)
    }

    fn connect(&self, local: Arc<dyn SharedMemory>, region: &Descriptor) -> Result<Box<dyn Endpoint>> {
        let there = self.world.state().regions.get(&region.address).cloned().unwrap_or_default();
        self.world.reaches(&self.host, &there)?;
        let inner = self.inner.connect(local, region)?;
        Ok(Box::new(Way { world: self.world.clone(), here: self.host.clone(), there, inner }))
    }
}

struct Way {
    world: World,
    here: String,
    there: String,
    inner: Box<dyn Endpoint>,
}

impl Endpoint for Way {
    fn write(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.inner.write(pieces)
    }

    fn read(&mut self, pieces: &[Piece]) -> Result<TransferId> {
        self.inner.read(pieces)
    }

    fn wait(&mut self, transfer: TransferId, timeout: Duration) -> Result<()> {
        // It has landed, but the acknowledgement is lost.
        self.world.reaches(&self.here, &self.there)?;
        self.inner.wait(transfer, timeout)?;
        self.world.count_kv(&self.here, &self.there);
        Ok(())
    }

    fn cancel(&mut self, transfer: TransferId) -> Result<()> {
        self.inner.cancel(transfer)
    }
}
