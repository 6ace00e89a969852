//! Connects to the members in the registry.

use super::calls::{Dial, call_members};
use super::hub::Hub;
use super::registry::{LinkState, Member, Members};
use super::router::Router;
use super::rpc::{CallError, Measured, ProbeLinks, Remote, RpcConfig};
use crate::env::SharedEnv;
use mixfleet_scheduler::fleet::InstanceId;
use std::sync::Arc;
use tokio::sync::watch;

/// Uses the instances of every worker process that is a member. Ends when the membership does.
pub async fn connect_workers(
    env: SharedEnv,
    router: Router,
    members: watch::Receiver<Members>,
    config: RpcConfig,
) {
    let wanted = |member: &Member| member.first_instance().is_some();
    let env2 = env.clone();
    let dial: Dial<CallError> = Arc::new(move |member| {
        let (env, router, config) = (env2.clone(), router.clone(), config.clone());
        Box::pin(async move {
            let remote = Remote::connect(&env, &member.address, &config).await?;
            let session = remote.router(&router.hello().to(member.first_instance()), router.id()).await?;
            tracing::info!(member = member.name(), address = member.address, "uses a worker process");
            router.add_worker(session).await;
            tracing::warn!(member = member.name(), "a worker process is lost");
            Ok(())
        })
    });
    call_members(env, members, wanted, dial).await;
}

/// Exchanges KV with every worker process that joined before this one: of two processes the later calls the
/// earlier, so that there is one session. Links are measured first, and recorded in `own`.
pub async fn connect_peers(
    env: SharedEnv,
    hub: Hub,
    probe_links: ProbeLinks,
    members: watch::Receiver<Members>,
    own: watch::Sender<Member>,
    config: RpcConfig,
) {
    let Some(&first) = hub.instances().iter().min() else { return };
    let wanted = move |member: &Member| member.first_instance().is_some_and(|id| id < first);
    let caller = Arc::new(Caller { env: env.clone(), hub, probe_links, own, config });
    let dial: Dial<CallError> = Arc::new(move |member| {
        let caller = caller.clone();
        Box::pin(async move { caller.add_peer(&member).await })
    });
    call_members(env, members, wanted, dial).await;
}

struct Caller {
    env: SharedEnv,
    hub: Hub,
    probe_links: ProbeLinks,
    own: watch::Sender<Member>,
    config: RpcConfig,
}

impl Caller {
    async fn add_peer(&self, member: &Member) -> Result<(), CallError> {
        let ended = match self.try_add_peer(member).await {
            Ok((measured, ended)) => {
                self.say(member, up(measured));
                ended
            }
            Err(error) => {
                self.say(member, LinkState::Down { reason: error.to_string() });
                return Err(error);
            }
        };
        let _ = ended.await;
        tracing::warn!(member = member.name(), "a peer is lost");
        self.say(member, LinkState::Down { reason: "the session ended".into() });
        Ok(())
    }

    async fn try_add_peer(
        &self,
        member: &Member,
    ) -> Result<(Measured, tokio::sync::oneshot::Receiver<()>), CallError> {
        let (hello, name) = (self.hub.hello().to(member.first_instance()), member.name());
        let remote = Remote::connect(&self.env, &member.address, &self.config).await?;
        let lent = remote.probe(&hello).await?;
        let measured = self.probe_links.measure(&self.env, lent).await;
        let measured = measured.map_err(|error| CallError::Failed(format!("no KV can go there: {error}")))?;
        for reason in &measured.broken {
            tracing::warn!(member = name, reason, "KV path broken; using the next one");
        }
        let (session, ended) = remote.peer(&hello, self.hub.instances(), measured.cost).await?;
        let theirs: Vec<InstanceId> = member.instances().map(|instance| instance.id).collect();
        self.hub.add_peer(theirs, measured.cost, session);
        let Measured { transport, details, .. } = &measured;
        let latency_s = measured.cost.latency.0;
        tracing::info!(member = name, transport, details, latency_s, "exchanges KV with a worker process");
        Ok((measured, ended))
    }

    fn say(&self, member: &Member, link: LinkState) {
        self.own.send_if_modified(|own| {
            let old = own.links.insert(member.name(), link.clone());
            old.as_ref() != Some(&link)
        });
    }
}

fn up(measured: Measured) -> LinkState {
    let Measured { transport, cost, details, broken } = measured;
    // A link too fast to measure is recorded as a byte per femtosecond.
    let bytes_per_s = 1.0 / cost.seconds_per_byte.max(1e-15);
    LinkState::Up { transport, latency_s: cost.latency.0, bytes_per_s, details, broken }
}
