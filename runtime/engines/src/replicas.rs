//! Engines behind one name: each address that the name resolves to is one of them.
//!
//! The name is that of a headless Service of Kubernetes, of a service of Compose, or any other with several
//! addresses. A fleet has a fixed number of *seats* for its engines. An address takes a free seat when the
//! name first resolves to it, and keeps it until its engine no longer answers and the name no longer resolves
//! to it, so that an engine that is being stopped completes its answers.

use mixfleet_hal::outside::{EngineFault, EngineFaultKind, EngineFuture};
use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Resolves `HOST:PORT` to addresses, by the system or another source.
pub type NameLookup = Arc<dyn Fn(String) -> EngineFuture<'static, io::Result<Vec<SocketAddr>>> + Send + Sync>;

/// For so long an answer is not asked for again.
const LOOK_EVERY: Duration = Duration::from_millis(900);
/// Time for an answer.
const LOOK_MAX: Duration = Duration::from_secs(5);

/// What the system says.
pub fn system_lookup() -> NameLookup {
    Arc::new(|name| Box::pin(async move { Ok(tokio::net::lookup_host(name).await?.collect()) }))
}

/// A name, and the addresses in its seats.
pub(crate) struct NamedEngines {
    /// `HOST:PORT`.
    name: String,
    lookup: NameLookup,
    table: tokio::sync::Mutex<ReplicaTable>,
}

#[derive(Default)]
struct ReplicaTable {
    looked: Option<Instant>,
    listed: BTreeSet<SocketAddr>,
    /// Why nothing newer is known.
    failure: Option<String>,
    seats: Vec<Option<SocketAddr>>,
}

impl ReplicaTable {
    /// The address of a seat, where a free seat takes an unseated address, and whether the name still
    /// resolves to it.
    fn sit(&mut self, seat: usize) -> Option<(SocketAddr, bool)> {
        if self.seats[seat].is_none() {
            self.seats[seat] =
                self.listed.iter().find(|address| !self.seats.contains(&Some(**address))).copied();
        }
        self.seats[seat].map(|address| (address, self.listed.contains(&address)))
    }

    /// The engine of a seat does not answer.
    fn fail(&mut self, seat: usize) {
        if self.seats[seat].is_some_and(|address| !self.listed.contains(&address)) {
            self.seats[seat] = None;
        }
    }

    /// Addresses for which there is no seat.
    fn left_out(&self) -> usize {
        self.listed.iter().filter(|address| !self.seats.contains(&Some(**address))).count()
    }
}

/// One of several engines behind a name.
pub(crate) struct ReplicaSeat {
    replicas: Arc<NamedEngines>,
    number: usize,
    address: Mutex<Option<SocketAddr>>,
}

impl ReplicaSeat {
    /// This many seats behind the name `HOST:PORT`.
    pub(crate) fn all(name: &str, count: usize, lookup: NameLookup) -> Vec<ReplicaSeat> {
        let table = ReplicaTable { seats: vec![None; count], ..ReplicaTable::default() };
        let replicas = Arc::new(NamedEngines { name: name.to_owned(), lookup, table: table.into() });
        let seat = |number| ReplicaSeat { replicas: replicas.clone(), number, address: Mutex::default() };
        (0..count).map(seat).collect()
    }

    /// Its number, from 1 on.
    pub(crate) fn number(&self) -> usize {
        self.number + 1
    }

    /// Its engine's address, if it has one.
    pub(crate) fn address(&self) -> Option<SocketAddr> {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, address: Option<SocketAddr>) {
        *self.address.lock().unwrap_or_else(PoisonError::into_inner) = address;
    }

    /// Resolves the name; returns whether it still includes the engine that has this seat.
    ///
    /// # Errors
    /// `Vacant` if there is none for it.
    pub(crate) async fn look(&self) -> Result<bool, EngineFault> {
        let NamedEngines { name, lookup, table } = &*self.replicas;
        // a concurrent caller uses the first one's result
        let mut table = table.lock().await;
        if table.looked.is_none_or(|looked| looked.elapsed() >= LOOK_EVERY) {
            let told = tokio::time::timeout(LOOK_MAX, lookup(name.clone())).await;
            table.looked = Some(Instant::now());
            match told {
                Ok(Ok(addresses)) => {
                    (table.listed, table.failure) = (addresses.into_iter().collect(), None);
                }
                // known addresses stay: engines exist even if no name server answers
                Ok(Err(error)) => table.failure = Some(format!("{name} is not known: {error}")),
                Err(_) => table.failure = Some(format!("{name} cannot be resolved")),
            }
        }
        let seated = table.sit(self.number);
        self.set(seated.map(|(address, _)| address));
        seated.map(|(_, is_listed)| is_listed).ok_or_else(|| match &table.failure {
            Some(failure) => EngineFault::new(EngineFaultKind::Unreachable, failure.clone()),
            None => {
                EngineFault::new(EngineFaultKind::Vacant, format!("{name} resolves to no further engine"))
            }
        })
    }

    /// Its engine does not answer.
    pub(crate) async fn fail(&self) {
        let mut table = self.replicas.table.lock().await;
        table.fail(self.number);
        self.set(table.seats[self.number]);
    }

    /// The message about engines for which there is no seat.
    pub(crate) async fn left_out(&self) -> Option<String> {
        let NamedEngines { name, table, .. } = &*self.replicas;
        let table = table.lock().await;
        let (left, seats) = (table.left_out(), table.seats.len());
        (left > 0 && self.number == 0)
            .then(|| format!("{name} resolves to {left} more engines than instances={seats}: raise it"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, last], 8000))
    }

    #[test]
    fn an_address_keeps_its_seat_until_its_engine_has_ended() {
        let mut table = ReplicaTable { seats: vec![None; 3], ..ReplicaTable::default() };
        assert_eq!(table.sit(0), None);
        table.listed = [at(1), at(2)].into();
        assert_eq!(
            (table.sit(0), table.sit(1), table.sit(2)),
            (Some((at(1), true)), Some((at(2), true)), None)
        );
        // another order, and one in place of another, which still ends its answers
        table.listed = [at(2), at(3)].into();
        assert_eq!(table.sit(2), Some((at(3), true)));
        assert_eq!((table.sit(0), table.sit(1)), (Some((at(1), false)), Some((at(2), true))));
        table.fail(1);
        assert_eq!(table.sit(1), Some((at(2), true)), "it may come back");
        table.listed.insert(at(4));
        assert_eq!((table.sit(0), table.left_out()), (Some((at(1), false)), 1));
        table.fail(0);
        assert_eq!((table.sit(0), table.left_out()), (Some((at(4), true)), 0));
    }
}
