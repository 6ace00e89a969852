//! What a link between two processes takes, over the first transport that works.

use super::client::Lent;
use crate::engine::measure::time_writes;
use crate::engine::{HandOffLimits, Links};
use crate::env::{SharedEnv, no_thread};
#[cfg(doc)]
use mixfleet_hal::transport::Endpoint;
use mixfleet_hal::transport::{Access, Descriptor};
use mixfleet_hal::{Error, ErrorKind, Result};
use mixfleet_scheduler::cost::LinkCost;
use tokio::sync::oneshot;

/// The ways of a process to others.
#[derive(Clone)]
pub struct Ways {
    /// The same that its instances use.
    pub links: Links,
    /// Staging of KV: links are measured with such pieces.
    pub hand_off: HandOffLimits,
}

/// A link, as it was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct Measured {
    /// The first transport that worked.
    pub transport: String,
    /// What it takes.
    pub cost: LinkCost,
    /// What the way says of itself: [`Endpoint::details`].
    pub details: String,
    /// What better transports said, of those that should have worked.
    pub broken: Vec<String>,
}

/// Memory that can be written to until this is dropped.
pub(super) struct Lending {
    pub(super) regions: Vec<Descriptor>,
    links: Links,
    env: SharedEnv,
}

impl Drop for Lending {
    fn drop(&mut self) {
        let (links, regions) = (self.links.clone(), std::mem::take(&mut self.regions));
        // It may have to wait for a peer that is writing.
        let end = async move {
            for region in &regions {
                for transport in links.transports.iter().filter(|t| t.name() == region.transport) {
                    if let Err(error) = transport.deregister(region) {
                        tracing::debug!(%error, "memory for measuring was not taken back");
                    }
                }
            }
        };
        if let Err(error) = self.env.spawn_worker("link probe", Box::pin(end)) {
            tracing::warn!(%error, "memory for measuring is kept: no thread can take it back");
        }
    }
}

impl Ways {
    /// Memory as large as where KV lands, reachable over every transport that can.
    pub(super) fn lend(&self, env: &SharedEnv) -> Result<Lending> {
        let memory = (self.links.make_region)(self.hand_off.region_bytes())?;
        let mut lending = Lending { regions: Vec::new(), links: self.links.clone(), env: env.clone() };
        for transport in &self.links.transports {
            match transport.register(memory.clone(), Access::Write) {
                Ok(region) => lending.regions.push(region),
                Err(error) => {
                    tracing::warn!(transport = transport.name(), %error, "cannot reach memory here")
                }
            }
        }
        if lending.regions.is_empty() {
            return Err(Error::unsupported("no transport reaches memory of this process"));
        }
        Ok(lending)
    }

    /// Writes to what a peer has lent.
    pub(crate) async fn measure(&self, env: &SharedEnv, lent: Lent) -> Result<Measured> {
        let (ways, env2) = (self.clone(), env.clone());
        let (done, measured) = oneshot::channel();
        let work = async move {
            let _ = done.send(ways.try_each(&env2, &lent.regions));
        };
        env.spawn_worker("link measure", Box::pin(work)).map_err(no_thread)?;
        measured.await.unwrap_or_else(|_| Err(Error::new(ErrorKind::Closed, "the link was not measured")))
    }

    fn try_each(&self, env: &SharedEnv, regions: &[Descriptor]) -> Result<Measured> {
        let mut broken = Vec::new();
        for region in regions {
            let Some(transport) = self.links.transports.iter().find(|t| t.name() == region.transport) else {
                continue;
            };
            let outbox = (self.links.make_region)(region.bytes.min(self.hand_off.region_bytes()))?;
            let measured = transport.connect(outbox.clone(), region).and_then(|mut endpoint| {
                let cost = time_writes(&|| env.now(), &mut *endpoint, &*outbox, self.hand_off)?;
                Ok((cost, endpoint.details()))
            });
            match measured {
                Ok((cost, details)) => {
                    return Ok(Measured { transport: region.transport.clone(), cost, details, broken });
                }
                // It says itself that it is not for this peer.
                Err(error) if error.kind == ErrorKind::Unsupported => {}
                Err(error) => broken.push(format!("{}: {error}", region.transport)),
            }
        }
        let detail = if broken.is_empty() { "no transport reaches it".into() } else { broken.join("; ") };
        Err(Error::new(ErrorKind::Closed, detail))
    }
}
