//! What befalls processes, connections and the registry.

use super::lent::LentMember;
use super::partitions::{router_host, worker_host};
use super::{RouterProcess, Worker, World};
use mixfleet_hal::random::Stream;
use mixfleet_runtime::env::Env;
use mixfleet_scheduler::fleet::Role;

impl World {
    /// Begins everything that the workload says.
    pub(super) fn begin_troubles(&self) {
        let workload = self.workload.clone();
        let spawn = |mean_s: f64, trouble: futures_util::future::BoxFuture<'static, ()>| {
            if mean_s > 0.0 {
                self.env.spawn(trouble);
            }
        };
        let mean_s = workload.kill_worker_every_s;
        spawn(mean_s, Box::pin(self.clone().kill_workers(mean_s)));
        let mean_s = workload.lose_member_every_s;
        spawn(mean_s, Box::pin(self.clone().lose_members(mean_s)));
        let mean_s = workload.kill_router_every_s;
        spawn(mean_s, Box::pin(self.clone().kill_routers(mean_s)));
        let mean_s = workload.cut_every_s;
        spawn(mean_s, Box::pin(self.clone().cut_wires(mean_s, "")));
        let mean_s = workload.cut_router_every_s;
        spawn(mean_s, Box::pin(self.clone().cut_wires(mean_s, "router")));
        let mean_s = workload.partition_every_s;
        spawn(mean_s, Box::pin(self.clone().partition(mean_s)));
        let mean_s = workload.registry_trouble_every_s;
        spawn(mean_s, Box::pin(self.clone().trouble_registry(mean_s)));
    }

    /// Kills a worker process now and then; another one takes its place later.
    async fn kill_workers(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.below(8) as usize;
            let number = {
                let state = self.state();
                state.workers.keys().copied().nth(struck % state.workers.len().max(1))
            };
            let Some((kind, role)) = number.and_then(|number| self.end_worker(number)) else { continue };
            self.count(if role.keeps() { "KV nodes killed" } else { "workers killed" }, 1);
            self.env.sleep(self.span(0.2)).await;
            self.start_worker(kind, self.next_role(kind, role)).await;
        }
    }

    /// Ends a worker process in the middle of anything: its kind and role.
    pub(super) fn end_worker(&self, number: u64) -> Option<(usize, Role)> {
        let dead = self.state().workers.remove(&number)?;
        self.count_part(&dead);
        let Worker { cut, hub, role, kind, disk, .. } = dead;
        self.shelve(disk);
        cut.now();
        drop(hub);
        Some((kind, role))
    }

    /// The worker that replaces a killed one: any kind, unless the others could serve no request without its
    /// kind.
    fn next_role(&self, kind: usize, killed: Role) -> Role {
        if killed.keeps() {
            return killed;
        }
        let others: Vec<Role> = {
            let state = self.state();
            state.workers.values().filter(|worker| worker.kind == kind).map(|worker| worker.role).collect()
        };
        let somebody = |wanted| others.iter().any(|&role| role == Role::Auto || role == wanted);
        if somebody(Role::Prefill) && somebody(Role::Decode) { self.role(2) } else { killed }
    }

    async fn kill_routers(self, mean_s: f64) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.below(8) as usize;
            let number = {
                let state = self.state();
                state.routers.keys().copied().nth(struck % state.routers.len().max(1))
            };
            let Some(kind) = number.and_then(|number| self.end_router(number)) else { continue };
            self.count("routers killed", 1);
            self.env.sleep(self.span(0.1)).await;
            self.start_router(kind).await;
        }
    }

    /// Ends a router: its kind.
    pub(super) fn end_router(&self, number: u64) -> Option<usize> {
        let RouterProcess { cut, kind, .. } = self.state().routers.remove(&number)?;
        cut.now();
        Some(kind)
    }

    async fn cut_wires(self, mean_s: f64, from: &'static str) {
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            let struck = self.env.random() as usize;
            let wire = {
                let mut state = self.state();
                state.wires.retain(|_, cut| !cut.is_cut());
                let meant = || state.wires.iter().filter(|((end, _), _)| end.starts_with(from));
                meant().nth(struck % meant().count().max(1)).map(|(_, cut)| cut.clone())
            };
            let Some(wire) = wire else { continue };
            wire.now();
            self.count("connections cut", 1);
        }
    }

    /// The registry is away for a while, with or without its content, or is emptied.
    async fn trouble_registry(self, mean_s: f64) {
        let mut next = Stream::new(self.env.random()).below(3);
        loop {
            self.env.sleep(self.span(mean_s)).await;
            if self.over() {
                return;
            }
            next += 1;
            if next.is_multiple_of(3) {
                self.registry.remove_keys();
                self.count("registry emptied", 1);
                continue;
            }
            self.registry.stop();
            self.count("registry stopped", 1);
            if next % 3 == 1 {
                self.registry.lose_data();
                self.count("registry lost its data", 1);
            }
            self.env.sleep(self.span(1.0)).await;
            self.registry.start();
        }
    }

    /// Faults end, and everything broken from outside works again.
    pub(super) fn end_troubles(&self) {
        let clients = {
            let mut state = self.state();
            state.over = true;
            state.workers.values().flat_map(|worker| &worker.members).for_each(LentMember::come_back);
            let workers = state.workers.values().map(|worker| worker.client.clone());
            workers.chain(state.routers.values().map(|router| router.client.clone())).collect::<Vec<_>>()
        };
        clients
            .iter()
            .for_each(|client| client.set_link(mixfleet_runtime::fleet::registry::sim::Reachability::Up));
        self.registry.set_faults(false);
        self.registry.start();
    }

    /// A process's way to the registry, by its host.
    pub(super) fn registry_client(
        &self,
        host: &str,
    ) -> Option<mixfleet_runtime::fleet::registry::sim::SimClient> {
        let state = self.state();
        let mut workers = state.workers.iter().filter(|(number, _)| worker_host(**number) == host);
        let mut routers = state.routers.iter().filter(|(number, _)| router_host(**number) == host);
        let worker = workers.next().map(|(_, worker)| worker.client.clone());
        worker.or_else(|| routers.next().map(|(_, router)| router.client.clone()))
    }
}
