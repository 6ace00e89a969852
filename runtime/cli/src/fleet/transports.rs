//! The transports by which a worker process exchanges KV.

use super::join::Join;
use super::{TransportName, WorkerArgs};
use crate::affinity::LocatedDevices;
use anyhow::{Result, bail};
use mixfleet_hal::transport::Transport;
use mixfleet_runtime::engine::HandOffLimits;
use mixfleet_wire::{InProcessTransport, Shm, Tcp, TcpConfig};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// Timeout of a piece of KV, which is then sent over another transport, or recomputed.
pub(super) const PIECE_TIMEOUT: Duration = Duration::from_secs(2);

/// Timeout for connecting to a peer. A worker stands still while it connects to a host that is away; a longer
/// connect lost its first packet.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Transports that a process offers its peers.
pub(super) struct Offered {
    /// The transports, best first.
    pub(super) transports: Vec<Arc<dyn Transport>>,
    /// Transports that exist and are not offered, each with the reason.
    pub(super) not_offered: Vec<String>,
}

/// Opens the transports that `args` name, RDMA only if the fabric is trusted.
pub(super) fn open(
    args: &WorkerArgs,
    join: &Join,
    data: SocketAddr,
    hand_off: &HandOffLimits,
    located: &LocatedDevices,
) -> Result<Offered> {
    let security = join.security.clone();
    let (mut transports, mut not_offered) = (Vec::<Arc<dyn Transport>>::new(), Vec::new());
    for name in &args.transports {
        match name {
            TransportName::Memory => transports.push(Arc::new(InProcessTransport::new())),
            TransportName::Shm => match Shm::new() {
                Ok(shm) => transports.push(Arc::new(shm)),
                Err(error) => not_offered.push(format!("shm: {error}")),
            },
            TransportName::Verbs => match rdma::open(security.clone(), data, args, hand_off, located) {
                Ok(verbs) => transports.push(verbs),
                Err(Some(reason)) => not_offered.push(format!("verbs: {reason}")),
                Err(None) => {}
            },
            TransportName::Tcp => transports.push(Arc::new(Tcp::new(TcpConfig {
                connect_timeout: CONNECT_TIMEOUT,
                silence: join.rpc.silence,
                ..TcpConfig::new(data, security.clone())
            })?)),
        }
    }
    for reason in &not_offered {
        tracing::warn!(reason, "KV transport not offered; using the next best");
    }
    if transports.is_empty() {
        bail!("none of --transports works here: add tcp");
    }
    Ok(Offered { transports, not_offered })
}

#[cfg(all(feature = "verbs", target_os = "linux"))]
mod rdma {
    use super::{Arc, HandOffLimits, LocatedDevices, SocketAddr, Transport, WorkerArgs};
    use mixfleet_discover::RdmaChoice;
    use mixfleet_hal::cast::to_usize;
    use mixfleet_hal::transport::RemoteAccess;
    use mixfleet_wire::verbs::{Verbs, VerbsOptions};
    use mixfleet_wire::{HostRegion, Security};

    /// Opens RDMA, if it is allowed and staging memory can be registered. A default that is missing its
    /// hardware is not reported.
    pub(super) fn open(
        security: Security,
        data: SocketAddr,
        args: &WorkerArgs,
        hand_off: &HandOffLimits,
        located: &LocatedDevices,
    ) -> Result<Arc<dyn Transport>, Option<String>> {
        let trusted = args.trusted_fabric;
        let NicChoice { wanted, why } = NicChoice::of(&args.rdma_devices, || located.rdma());
        // The keys are exchanged under the same certificates as KV over TCP.
        let listen = trusted.then(|| SocketAddr::new(data.ip(), 0));
        let options = VerbsOptions { listen, security, devices: wanted.clone(), ..VerbsOptions::default() };
        let is_default = args.rdma_devices.is_empty() && !wanted.is_empty();
        let verbs = match Verbs::open(options.clone()) {
            // the kernel also shows NICs that this process must not open
            Err(_) if is_default => Verbs::open(VerbsOptions { devices: Vec::new(), ..options }),
            opened => opened,
        };
        let verbs = verbs.map_err(|absent| trusted.then_some(absent.reason))?;
        let devices = verbs.devices();
        let names: Vec<&str> = devices.iter().map(|(name, _)| name.as_str()).collect();
        if !trusted {
            return Err(Some(format!(
                "{} is available, but its traffic is not encrypted: use --trusted-fabric if the network has no other users",
                names.join(", ")
            )));
        }
        can_register(&verbs, hand_off).map_err(|error| {
            Some(format!("{error}; each pair of instances needs {} MiB", staging_bytes(hand_off) >> 20))
        })?;
        let unopened: Vec<&str> =
            wanted.iter().map(String::as_str).filter(|name| !names.contains(name)).collect();
        if !unopened.is_empty() {
            let (unopened, used) = (unopened.join(", "), names.join(", "));
            tracing::warn!(unopened, used, "RDMA NICs cannot be opened; others are used");
        }
        tracing::info!(devices = names.join(", "), why, "KV may be sent over RDMA, unencrypted");
        Ok(Arc::new(verbs))
    }

    /// The NICs to open.
    struct NicChoice {
        /// Names of RDMA devices; all if there are none.
        wanted: Vec<String>,
        why: String,
    }

    impl NicChoice {
        /// The `named` NICs, or else the nearest ones.
        fn of(named: &[String], nearest: impl FnOnce() -> RdmaChoice) -> Self {
            if !named.is_empty() {
                return NicChoice { wanted: named.to_vec(), why: "named by --rdma-devices".into() };
            }
            let choice = nearest();
            let wanted = choice.names();
            let why =
                if wanted.is_empty() { format!("all NICs, since {choice}") } else { choice.to_string() };
            NicChoice { wanted, why }
        }
    }

    /// Bytes that a pair of instances registers at each end.
    fn staging_bytes(hand_off: &HandOffLimits) -> u64 {
        hand_off.slot_bytes * u64::from(hand_off.slots)
    }

    fn can_register(verbs: &Verbs, hand_off: &HandOffLimits) -> mixfleet_hal::Result<()> {
        let region = HostRegion::new(to_usize(staging_bytes(hand_off)))?;
        let registered = verbs.register(Arc::new(region), RemoteAccess::Write)?;
        verbs.deregister(&registered)
    }

    #[cfg(test)]
    mod tests {
        use super::*;
        use mixfleet_discover::NearestRdma;

        #[test]
        fn a_named_nic_wins_over_the_nearest_one() {
            let nearest = |names: &[&str], reason: &str| RdmaChoice {
                devices: vec![NearestRdma {
                    device: "cuda:0".into(),
                    names: names.iter().map(|name| (*name).into()).collect(),
                    reason: reason.into(),
                }],
            };
            let switch = || nearest(&["mlx5_0"], "same PCIe switch");
            let chosen = NicChoice::of(&["mlx5_3".into()], switch);
            assert_eq!(
                (&chosen.wanted[..], &*chosen.why),
                (&["mlx5_3".to_owned()][..], "named by --rdma-devices")
            );
            let chosen = NicChoice::of(&[], switch);
            assert_eq!((&*chosen.wanted[0], &*chosen.why), ("mlx5_0", "cuda:0: mlx5_0 (same PCIe switch)"));
            let chosen = NicChoice::of(&[], || nearest(&[], "no PCI address"));
            assert_eq!((chosen.wanted.len(), &*chosen.why), (0, "all NICs, since cuda:0: no PCI address"));
        }
    }
}

#[cfg(not(all(feature = "verbs", target_os = "linux")))]
mod rdma {
    use super::{Arc, HandOffLimits, LocatedDevices, SocketAddr, Transport, WorkerArgs};
    use mixfleet_wire::Security;

    /// The directory in which the kernel lists RDMA devices.
    const DEVICES: &str = "/sys/class/infiniband";

    /// Reports that this build has no RDMA, if there is hardware for it or the user asked for it.
    pub(super) fn open(
        _: Security,
        _: SocketAddr,
        args: &WorkerArgs,
        _: &HandOffLimits,
        _: &LocatedDevices,
    ) -> Result<Arc<dyn Transport>, Option<String>> {
        let there = std::fs::read_dir(DEVICES).is_ok_and(|mut devices| devices.next().is_some());
        let why = "this build cannot use RDMA: build with the feature verbs, on Linux";
        Err((args.trusted_fabric || there).then(|| why.into()))
    }
}
